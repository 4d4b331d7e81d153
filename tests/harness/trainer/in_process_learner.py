"""Controller and learner in one process: for tests that step the controller, and for processes of one launch.

As a program it is one of several processes of one trainer, as `accelerate launch` starts it; the settings are JSON.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ratchet.trainer.controller import process
from ratchet.trainer.controller.learner_work import LearnerFactory
from ratchet.trainer.learner import distributed
from ratchet.trainer.learner.host import LearnerHost
from ratchet.trainer.learner.launch import processes
from ratchet.trainer.learner_api import LearnerProtocol, RoundReport
from ratchet.trainer.local_learner import Learner
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerSettings
from ratchet.trainer.settings.trainer_settings import TrainerSettings


class LockedLearner(Learner):
    """A learner that a scripted vLLM may ask for logprobs while it trains: that waits for the end of the round."""

    def __init__(self, *values: Any, **named: Any) -> None:
        self._lock = threading.RLock()
        super().__init__(*values, **named)

    def train_round(self, rows: Sequence[TokenRow], rate_scale: float = 1.0) -> RoundReport:
        with self._lock:
            return super().train_round(rows, rate_scale)

    def score(
        self, rows: Sequence[TokenRow | Sequence[int]], *, adapter: bool | str | Path = True
    ) -> list[tuple[float, ...]]:
        with self._lock:
            return super().score(rows, adapter=adapter)

    def save(self, folder: str | Path) -> None:
        with self._lock:
            super().save(folder)

    def load(self, folder: str | Path | None, settings: LearnerSettings) -> None:
        with self._lock:
            super().load(folder, settings)


def make_learner(settings: TrainerSettings, resume_from: str | None) -> LearnerProtocol:
    """Return a new learner, or the learner of a checkpoint."""
    return _learner(settings, resume_from, LearnerHost)


def run_with_learner(run: Callable[[LearnerFactory], int]) -> int:
    """Run the controller with a learner of this process and its group; return the exit code."""
    if processes() == 1:
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
    return LockedLearner(
        settings.base_model,
        settings.learner,
        resume_from=None if resume_from is None else Path(resume_from),
        process=settings.learner_process,
        make_host=make_host,
    )


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    settings = TrainerSettings(**json.loads(sys.argv[1]))
    sys.exit(run_with_learner(lambda made: process.run({settings.model: settings}, made)))
