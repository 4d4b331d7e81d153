"""Several processes that train as one, as `accelerate launch` starts them: the first one leads, the others follow.

The leader is the trainer daemon; whatever its learner does that takes all of them (being made, a round, a checkpoint)
it tells the followers first, who then do the same with the same rows. Promises: followers look at nothing but what
they are told, so that one daemon alone meets store, judge and vLLM; an error that all of them meet is the leader's to
handle; followers end when the leader does, and the leader when one of them ends, before anything is committed: their
launcher then ends all, and the next start goes on from the last commit. Torch is imported when the first learner is
made or followed.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from trainer.errors import ProcessLost, TrainerError
from trainer.learning.learner import Learner, RoundReport
from trainer.learning.learner_settings import LearnerSettings
from trainer.learning.tokens import TokenRow

log = logging.getLogger(__name__)

_PATIENCE = timedelta(days=30)  # between two rounds there may be hours without traffic
_STOP = "stop"
_BROKEN = ("gloo", "NCCL")  # what torch's messages of a broken connection name; gloo's have no class of their own


def processes() -> int:
    """Return how many processes this one is of, as its launcher says."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_leader() -> bool:
    """Return whether this process is the first of them."""
    return int(os.environ.get("RANK", "0")) == 0


class Line:
    """How the leader speaks to the followers: in a group of its own, on the CPU, whatever they train on."""

    def __init__(self) -> None:
        import torch.distributed
        from accelerate import PartialState

        PartialState(timeout=_PATIENCE)
        self._distributed = torch.distributed
        self._group: Any = torch.distributed.new_group(backend="gloo", timeout=_PATIENCE)

    def tell(self, what: str, *values: Any) -> None:
        """Say something to every follower."""
        self._distributed.broadcast_object_list([what, values], src=0, group=self._group)

    def hear(self) -> tuple[str, tuple[Any, ...]]:
        """Wait for what the leader says next."""
        said: list[Any] = [None, None]
        self._distributed.broadcast_object_list(said, src=0, group=self._group)
        return said[0], said[1]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Tell the end of another process, which its collectives meet as a broken connection. Raises ProcessLost."""
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, self._distributed.DistError) and not any(w in str(error) for w in _BROKEN):
                raise
            raise ProcessLost(
                "a process that trains along has ended: its own last lines say why. What was not committed is trained "
                "by the next start"
            ) from error

    def close(self) -> None:
        """Let the followers go, and leave the group."""
        try:
            if is_leader():
                with self.kept():
                    self.tell(_STOP)
        except ProcessLost:
            log.info("event=follower_gone")
        self._distributed.destroy_process_group()


class LeadingLearner(Learner):
    """The leader's learner: what it does, the followers do."""

    def __init__(
        self, line: Line, base_model: str, settings: LearnerSettings, *, workdir: Path, resume_from: Path | None = None
    ) -> None:
        self._line = line
        with line.kept():
            line.tell("made", base_model, settings, workdir, resume_from)
            super().__init__(base_model, settings, workdir=workdir, resume_from=resume_from)

    def train_round(self, rows: Sequence[TokenRow]) -> RoundReport:
        """Learn from the rows once, all together. Raises as `Learner.train_round` does, and ProcessLost."""
        with self._line.kept():
            self._line.tell("train_round", list(rows))
            return super().train_round(rows)

    def save(self, folder: Path) -> None:
        """Write a checkpoint. Raises as `Learner.save` does, and ProcessLost."""
        with self._line.kept():
            self._line.tell("save", folder)
            super().save(folder)


def follow(line: Line) -> None:
    """Do what the leader says until it says stop. A signal does not end this process: the leader does."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    learner: Learner | None = None
    while True:
        what, values = line.hear()
        if what == _STOP:
            line.close()
            return
        try:
            if what == "made":
                base_model, settings, workdir, resume_from = values
                learner = None  # there may not be room for two
                learner = Learner(base_model, settings, workdir=workdir / _own(), resume_from=resume_from)
            elif learner is not None:
                getattr(learner, what)(*values)
        except TrainerError as error:  # the leader meets it as well
            log.info("event=follower_error error=%s reason=%r", type(error).__name__, str(error))


def _own() -> str:
    return f"process{os.environ.get('RANK', '0')}"
