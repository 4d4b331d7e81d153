"""Versions of the tiny policy for swaps: a real learner, whose every step makes an adapter of its own.

What it learns from is drawn, not sampled: the versions are good for nothing but being swapped.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from ratchet.trainer.local_learner import Learner
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerSettings
from tests.harness.cli.project import ROOT

POLICY = ROOT / "ratchet" / "demo" / "email_search" / "policy"
_IDS = (260, 480)  # of the tiny policy's words
_TOKENS = 24


class DrawnRowsLearner:
    """A learner of the tiny policy that takes one step at a time."""

    def __init__(self) -> None:
        self._learner = Learner(str(POLICY), LearnerSettings(learning_rate=5e-3, lora_r=8, lora_alpha=16, threads=1))
        self._dice = random.Random(1)

    def learn(self, names: Sequence[str]) -> None:
        """Take one step on randomly drawn rows with these names."""
        self._learner.train_round([self._row(f"{name}-{number}") for name in names for number in range(4)])

    def save(self, folder: Path) -> None:
        """Write the version as the trainer does."""
        self._learner.save(folder)

    def score(
        self, rows: Sequence[TokenRow | Sequence[int]], *, adapter: bool | str | Path = True
    ) -> list[tuple[float, ...]]:
        """Return the logprobs of every id of each sequence."""
        return self._learner.score(rows, adapter=adapter)

    def _row(self, name: str) -> TokenRow:
        ids = tuple(self._dice.randrange(*_IDS) for _ in range(_TOKENS))
        mask = tuple(int(place >= _TOKENS // 2) for place in range(_TOKENS))
        (logprobs,) = self._learner.score([ids])
        return TokenRow(name, ids, mask, logprobs, advantage=self._dice.choice((-1.0, 1.0)))
