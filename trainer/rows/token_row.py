"""Token rows: what the learner is fed, and all that it knows of a trajectory.

A row is one token sequence of length T as the engine saw it: ids, which of them the engine sampled, the logprobs that
it sampled them with, and the advantage that they earned. A trajectory whose context forked is simply several rows with
the same advantage. Promises that a row that exists is sound. Does not know tensors, judges or groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ratchet.trainer.errors import RowError

# Engines round: a certain token may come back as +1e-7. Anything larger is no logprob.
LOGPROB_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One sequence of T tokens to learn from.

    ids          (T,) token ids as sampled and rendered by the engine, never re-tokenized text
    mask         (T,) 1 = sampled by the engine and carries loss, 0 = context; the first token is always context
    logprobs     (T,) logprob that the token was sampled with, after temperature; ignored where mask is 0
    advantage    of every trained token of the row, unless `advantages` (T,) gives one per token
    temperature  that the row was sampled with; the learner divides its logits by it
    importance   False for rows sampled under top_p < 1, top_k, min_p or penalties: their logprobs belong to another
                 distribution, so a ratio against them would be biased, and none is taken
    age          versions that were trained since the one that sampled it; None where that is not known
    group        of the trajectories that it is compared with; only preferences look at it

    Raises RowError, naming the trajectory, when the row contradicts itself.
    """

    trajectory_id: str
    ids: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    advantage: float
    temperature: float = 1.0
    advantages: tuple[float, ...] | None = None
    importance: bool = True
    group: str = ""
    age: int | None = None

    def __post_init__(self) -> None:
        problem = self._shape_problem() or self._value_problem()
        if problem:
            raise RowError(f"row of trajectory {self.trajectory_id}: {problem}")

    @property
    def tokens_trained(self) -> int:
        """How many tokens carry loss."""
        return sum(self.mask)

    @property
    def has_signal(self) -> bool:
        """Whether a trained token has an advantage other than 0."""
        if self.advantages is None:
            return self.advantage != 0.0
        return any(a != 0.0 for a, m in zip(self.advantages, self.mask, strict=True) if m)

    def _shape_problem(self) -> str | None:
        lengths = {"ids": len(self.ids), "mask": len(self.mask), "logprobs": len(self.logprobs)}
        if self.advantages is not None:
            lengths["advantages"] = len(self.advantages)
        if len(set(lengths.values())) > 1:
            return "lengths differ: " + ", ".join(f"{name} {length}" for name, length in lengths.items())
        if not set(self.mask) <= {0, 1}:
            return "mask holds something other than 0 and 1"
        if not any(self.mask):
            return "no token is trained: mask holds no 1"
        if self.mask[0] != 0:
            return "mask[0] must be 0: nothing precedes the first token, so no model can score it"
        return None

    def _value_problem(self) -> str | None:
        if min(self.ids) < 0:
            return f"ids[{self.ids.index(min(self.ids))}] is negative"
        for place, (logprob, trained) in enumerate(zip(self.logprobs, self.mask, strict=True)):
            if trained and not -math.inf < logprob <= LOGPROB_TOLERANCE:
                return f"logprobs[{place}] is {logprob}, not a finite logprob at or below 0"
        given = (self.advantage, *(self.advantages or ()))
        if not all(map(math.isfinite, given)):
            return "an advantage is not finite"
        if not 0.0 < self.temperature < math.inf:
            return f"temperature is {self.temperature}; greedy rows carry no exploration and are not RL data"
        return None


def split_by_budget(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Indices of sequences grouped into micro-batches of at most `token_budget` padded tokens.

    Sorted by length, so that padding is small. A sequence longer than the budget stands alone.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        # Sorted by length: the newest member is the longest, and every other one is padded to it.
        if batches and (len(batches[-1]) + 1) * lengths[index] <= token_budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
