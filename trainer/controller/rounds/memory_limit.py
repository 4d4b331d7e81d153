"""Memory: how the next round is made smaller when one did not fit, so that no row can stop the trainer for ever.

    rounds without memory in a row    the next one is trained with
    ------------------------------    ----------------------------------------------------------
    1                                 micro-batches of a quarter of `token_budget`
    2                                 each row in a micro-batch of its own
    3                                 likewise, without the longest row
    4                                 likewise, without the rows above three quarters of the longest
    5                                 nothing: the trainer stops, and its groups wait

Promises that the count outlives the trainer, since the store has the rounds and why they were broken off; that what was
found to fit is kept until the trainer is started anew; and that rows of any length are trained again where only other
processes had taken the memory. A row that is left out is counted; a trajectory that has no other is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from ratchet.store.states import RoundState
from ratchet.store.store import Store
from ratchet.trainer.errors import OutOfMemory
from ratchet.trainer.settings.learner_settings import LearnerSettings

_ROWS_ALONE, _WITHOUT_LONGEST, _WITHOUT_LONG = 2, 3, 4
_SHARE = 4  # of the token budget, at first
_LONG = 0.75  # of the longest row
_ROUNDS_SEEN = 20


class Memory:
    """What the learner of one alias is given, by what did not fit before."""

    def __init__(self, store: Store, alias: str, learner: LearnerSettings) -> None:
        self._settings = learner
        self._failures = min(_broken_off(store, alias), _WITHOUT_LONG)
        self._longest = learner.max_length

    @property
    def short(self) -> bool:
        """Whether the last round did not fit."""
        return self._failures > 0

    @property
    def learner(self) -> LearnerSettings:
        """The learner's settings for the next round."""
        if not self._failures:
            return self._settings
        budget = self._settings.token_budget // _SHARE if self._failures < _ROWS_ALONE else 1
        return replace(self._settings, token_budget=max(1, budget))

    def longest(self, lengths: Sequence[int]) -> int | None:
        """Return how many tokens the longest row of the next round may have, of rows of these lengths; None: any.

        Raises OutOfMemory where no row would be left.
        """
        if self._failures >= _WITHOUT_LONGEST and lengths:
            most = max(lengths)
            measured = most - 1 if self._failures == _WITHOUT_LONGEST else int(_LONG * most)
            if measured < min(lengths):
                raise OutOfMemory(
                    f"not one of {len(lengths)} rows fits into memory alone, the shortest of {min(lengths)} tokens: "
                    "set learner.gradient_checkpointing, or give the trainer more"
                )
            self._longest = measured if self._longest is None else min(self._longest, measured)
        return self._longest

    def failed(self) -> bool:
        """Count a round that did not fit; return whether a smaller one is worth trying."""
        self._failures += 1
        return self._failures <= _WITHOUT_LONG

    def fitted(self) -> None:
        """A round was committed: go on with what fits."""
        self._failures = min(self._failures, _ROWS_ALONE)


def _broken_off(store: Store, alias: str) -> int:
    """Return how many rounds in a row were broken off for want of memory since the last commit."""
    since = takewhile(lambda held: held.state is not RoundState.COMMITTED, store.rounds.page(alias, _ROUNDS_SEEN))
    return sum(OutOfMemory.__name__ in (held.reason or "") for held in since)
