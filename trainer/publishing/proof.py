"""The proof of a swap: is the version that vLLM serves the one that the trainer made?

A pure function of logprobs on the same probe tokens. An adapter that never reached the engine, a stale cache or a wrong
file all leave the served logprobs away from the trainer's, or exactly where the old version's were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean


@dataclass(frozen=True, slots=True)
class Proof:
    """What the probe showed, in nats per token; `reason` says why it failed, None where it did not."""

    reason: str | None
    tokens: int
    served_vs_trainer: float  # mean |served new - trainer new|
    served_vs_trainer_worst: float
    served_vs_old: float  # mean |served new - served old|
    old_vs_trainer: float  # mean |served old - trainer new|

    @property
    def holds(self) -> bool:
        """Whether the swap is proven."""
        return self.reason is None


def prove(
    trainer_new: Sequence[float],
    served_new: Sequence[float],
    served_old: Sequence[float | None],
    *,
    tolerance: float,
) -> Proof:
    """Compare (T,) logprobs of the same tokens under the new version, as trained and as served, and the old one's.

    None in `served_old`: the old version holds the token too unlikely to tell. Holds when the served ones lie within
    `tolerance` of the trainer's on average, are not the old version's, and are nearer to the trainer's than the old
    ones wherever the step is larger than the noise between the two machines.
    """
    near = [abs(new - trained) for new, trained in zip(served_new, trainer_new, strict=True)]
    known = [
        (abs(new - old), abs(old - trained))
        for new, old, trained in zip(served_new, served_old, trainer_new, strict=True)
        if old is not None
    ]
    if not near:
        return Proof("there was no probe to compare", 0, 0.0, 0.0, 0.0, 0.0)
    error = fmean(near)
    change = fmean(moved for moved, _ in known) if known else inf
    old_error = fmean(before for _, before in known) if known else inf
    reason = None
    if error > tolerance:
        reason = f"served logprobs lie {error:.4f} nats from the trainer's, more than the tolerance of {tolerance}"
    elif change == 0.0:
        reason = "served logprobs are exactly those of the old version: the adapter is not applied"
    elif change > 3 * error and old_error < error:
        reason = "served logprobs moved away from the trainer's"
    return Proof(reason, len(near), error, max(near), change, old_error)
