"""Controller and learner in one process: for tests that step the controller, and for processes of one launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from ratchet.trainer.learner import distributed, launch
from ratchet.trainer.learner.host import LearnerHost
from ratchet.trainer.learner.learner import Learner
from ratchet.trainer.learner_protocol import LearnerProtocol
from ratchet.trainer.learner_work import LearnerFactory
from ratchet.trainer.settings.trainer_settings import TrainerSettings


def make_learner(settings: TrainerSettings, resume_from: str | None) -> LearnerProtocol:
    """Return a new learner, or the learner of a checkpoint."""
    return _learner(settings, resume_from, LearnerHost)


def run_with_learner(run: Callable[[LearnerFactory], int]) -> int:
    """Run the controller with a learner of this process and its group; return the exit code."""
    if launch.processes() == 1:
        return run(make_learner)
    channel = distributed.FollowerChannel()
    if not distributed.is_leader():
        return distributed.follow(channel)
    try:
        return run(partial(_make_leading_learner, channel))
    finally:
        channel.close()


def _make_leading_learner(
    channel: distributed.FollowerChannel, settings: TrainerSettings, resume_from: str | None
) -> LearnerProtocol:
    return _learner(settings, resume_from, partial(distributed.LeadingHost, channel))


def _learner(settings: TrainerSettings, resume_from: str | None, make_host: Callable[..., LearnerHost]) -> Learner:
    return Learner(
        settings.base_model,
        settings.learner,
        workdir=settings.checkpoints.parent,
        resume_from=None if resume_from is None else Path(resume_from),
        process=settings.learner_process,
        make_host=make_host,
    )
