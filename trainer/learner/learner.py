"""Learner: one agent of a LearnerHost, for a process that trains one agent only. It implements LearnerProtocol."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ratchet.trainer.learner.host import LearnerHost
from ratchet.trainer.learner_api.protocol import RoundReport, unfit
from ratchet.trainer.observability.progress import TRAINING, Progress
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_process_settings import LearnerProcessSettings, process_settings_of
from ratchet.trainer.settings.learner_settings import LearnerSettings

__all__ = ["Learner", "LearnerSettings", "RoundReport"]

_AGENT = "agent"


class Learner:
    """A base model with the adapter and the optimizer of its only agent.

    `base_model` is a folder or a hub name; `resume_from` is a checkpoint
    folder written by `save`. Settings that `settings` and `process` both have are taken from `settings`. Raises
    ModelNotFound, NotAModel, SettingError, CheckpointDamaged or CheckpointMismatch.
    """

    def __init__(
        self,
        base_model: str,
        settings: LearnerSettings,
        *,
        resume_from: Path | None = None,
        process: LearnerProcessSettings | None = None,
        make_host: Callable[..., LearnerHost] = LearnerHost,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._progress = Progress()
        self.host = make_host(base_model, process_settings_of(settings, process), clock=clock)
        self.host.open(_AGENT, settings, resume_from)

    @property
    def step(self) -> int:
        """Optimizer steps since the first round, over all restarts."""
        return self.host.step(_AGENT)

    def report_progress_to(self, progress: Progress) -> None:
        """Report the progress of rounds here from now on."""
        self._progress = progress

    def unfit(self, row: TokenRow) -> str | None:
        """Return why the base model cannot be trained on a row; None if it can."""
        return unfit(self.host.limits, row)

    def train_round(self, rows: Sequence[TokenRow], rate_scale: float = 1.0) -> RoundReport:
        """Train on the rows once, as `LearnerHost.train_round` does."""
        work = self._progress.begin(TRAINING, len(rows))
        try:
            return self.host.train_round(_AGENT, rows, rate_scale, work.add)
        finally:
            work.end()

    def score(
        self, rows: Sequence[TokenRow | Sequence[int]], *, adapter: bool | str | Path = True
    ) -> list[tuple[float, ...]]:
        """Return the logprobs of the tokens of each sequence, as `LearnerHost.score` does."""
        return self.host.score(_AGENT, rows, adapter=adapter if isinstance(adapter, bool) else Path(adapter))

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint, as `LearnerHost.save` does."""
        self.host.save(_AGENT, Path(folder))

    def load(self, folder: str | Path | None, settings: LearnerSettings) -> None:
        """Take the state of a learner created with `settings` and resumed from `folder`; None: of a new learner.

        Replaces adapter and optimizer in place; the base model stays loaded. Raises as `LearnerHost.open` does.
        """
        self.host.open(_AGENT, settings, None if folder is None else Path(folder))
