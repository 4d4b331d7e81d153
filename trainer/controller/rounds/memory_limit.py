"""MemoryLimit: makes the next round smaller after one ran out of memory, so that no row can block training for ever.

    out-of-memory rounds in a row     the next round is trained with
    -----------------------------     ----------------------------------------------------------
    1                                 micro-batches of a quarter of `token_budget`
    2                                 one row per micro-batch
    3                                 one row per micro-batch, without the longest row
    4                                 one row per micro-batch, without rows above three quarters of the longest
    5                                 nothing: the trainer stops, and its groups wait

Promises: the count survives a restart, because the store has the rounds and why they were abandoned; a size that fits
is kept until the next start; after a restart rows of any length are tried again, in case other processes had used the
memory. Rows that are left out are counted; a trajectory without another row is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from ratchet.store.states import RoundState
from ratchet.store.store import Store
from ratchet.trainer.errors import OutOfMemory
from ratchet.trainer.settings.learner_settings import LearnerSettings

_SINGLE_ROWS, _WITHOUT_MAX_LENGTH, _WITHOUT_LONG = 2, 3, 4  # failures in a row
_BUDGET_DIVISOR = 4
_LONG = 0.75  # of the longest row
_ROUNDS_READ = 20


class MemoryLimit:
    """The learner settings and the row length of the next round, after out-of-memory rounds."""

    def __init__(self, store: Store, alias: str, learner: LearnerSettings) -> None:
        self._settings = learner
        self._failures = min(_failed_rounds(store, alias), _WITHOUT_LONG)
        self._max_row_length = learner.max_length

    @property
    def is_reduced(self) -> bool:
        """Whether the next round is smaller than the settings say."""
        return self._failures > 0

    @property
    def learner_settings(self) -> LearnerSettings:
        """The learner's settings for the next round."""
        if not self._failures:
            return self._settings
        budget = self._settings.token_budget // _BUDGET_DIVISOR if self._failures < _SINGLE_ROWS else 1
        return replace(self._settings, token_budget=max(1, budget))

    def max_row_length(self, lengths: Sequence[int]) -> int | None:
        """Return the largest row length in tokens for the next round, given its row lengths; None if unlimited.

        Raises OutOfMemory if no row would be left.
        """
        if self._failures >= _WITHOUT_MAX_LENGTH and lengths:
            length = max(lengths)
            limit = length - 1 if self._failures == _WITHOUT_MAX_LENGTH else int(_LONG * length)
            if limit < min(lengths):
                raise OutOfMemory(
                    f"none of the {len(lengths)} rows fits into memory, the shortest has {min(lengths)} tokens: "
                    "set learner.gradient_checkpointing, or give the trainer more memory"
                )
            self._max_row_length = limit if self._max_row_length is None else min(self._max_row_length, limit)
        return self._max_row_length

    def record_failure(self) -> bool:
        """Count an out-of-memory round; return whether to try a smaller one."""
        self._failures += 1
        return self._failures <= _WITHOUT_LONG

    def record_success(self) -> None:
        """Keep the size of the committed round."""
        self._failures = min(self._failures, _SINGLE_ROWS)


def _failed_rounds(store: Store, alias: str) -> int:
    """Return the number of out-of-memory rounds since the last commit."""
    since = takewhile(lambda one: one.state is not RoundState.COMMITTED, store.rounds.page(alias, _ROUNDS_READ))
    return sum(OutOfMemory.__name__ in (one.reason or "") for one in since)
