"""Learners that fail: a power cut after the checkpoint, a gradient that is not finite, out of memory."""

from __future__ import annotations

from collections.abc import Sequence

from ratchet.trainer.errors import OutOfMemory, TrainingDiverged
from ratchet.trainer.learner_api import LearnerProtocol, RoundReport
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerSettings


class Power:
    """A power cut after the checkpoint is on disk and before the commit."""

    def __init__(self, learner: LearnerProtocol) -> None:
        self._learner = learner

    @property
    def step(self) -> int:
        return self._learner.step

    def unfit(self, row: TokenRow) -> str | None:
        return self._learner.unfit(row)

    def train_round(self, rows: Sequence[TokenRow], rate_scale: float = 1.0) -> RoundReport:
        return self._learner.train_round(rows, rate_scale)

    def score(self, rows: Sequence[TokenRow | Sequence[int]], *, adapter: bool | str = True) -> list[tuple[float, ...]]:
        return self._learner.score(rows, adapter=adapter)

    def save(self, reference: str) -> None:
        self._learner.save(reference)
        raise KeyboardInterrupt

    def load(self, reference: str | None, settings: LearnerSettings) -> None:
        self._learner.load(reference, settings)


class Diverging(Power):
    """A learner whose gradient is not finite."""

    def train_round(self, rows: Sequence[TokenRow], rate_scale: float = 1.0) -> RoundReport:
        raise TrainingDiverged("the gradient's norm is nan")


class TooLarge(Power):
    """A learner whose round does not fit into memory."""

    def train_round(self, rows: Sequence[TokenRow], rate_scale: float = 1.0) -> RoundReport:
        raise OutOfMemory("lower learner.token_budget")
