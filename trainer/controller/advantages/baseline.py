"""The running baseline of singles: what trajectories of the same task family scored before. Pure, in memory.

A baseline for a trajectory is made of scores that were given before its own, so it never includes the sample itself
and does not depend on it (Williams 1992: any such baseline leaves the gradient unbiased). Newer scores count more,
halving every `HALF_LIFE` scores, since the policy moves. Where attempts at the very same task are known (its cohort),
their mean is drawn towards the family's with the weight of `SHRINKAGE` scores.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ratchet.store.records import PastScore
from ratchet.trainer.settings.trainer_fields import MAX_SCORES_PER_FAMILY

HALF_LIFE = 64.0  # scores
SHRINKAGE = 4.0  # scores
_MAX_FAMILIES = 4096


@dataclass(frozen=True, slots=True)
class Baseline:
    """Mean and standard deviation to compare with, and of how many scores they were made."""

    mean: float
    std: float
    count: int


class ScoreHistory:
    """The scores of one alias and one judge's version, by family."""

    def __init__(self, past: Sequence[PastScore] = ()) -> None:
        self._families: dict[str, deque[PastScore]] = {}
        for scored in sorted(past, key=lambda one: one.judged_at):
            self.add(scored)

    def add(self, scored: PastScore) -> None:
        """Remember a score; of a trajectory that was scored before, the new one alone."""
        if scored.family not in self._families and len(self._families) >= _MAX_FAMILIES:
            del self._families[next(iter(self._families))]
        known = self._families.setdefault(scored.family, deque(maxlen=MAX_SCORES_PER_FAMILY))
        for earlier in [one for one in known if one.trajectory_id == scored.trajectory_id]:
            known.remove(earlier)
        known.append(scored)

    def ready(self, least: int) -> set[str]:
        """Return the families with so many scores that the next one has a baseline."""
        return {family for family, known in self._families.items() if len(known) >= least}

    def baseline(self, sample: PastScore, least: int) -> Baseline | None:
        """Return the baseline for a sample; None where fewer than `least` scores were given before it."""
        earlier = [
            one
            for one in self._families.get(sample.family, ())
            if one.judged_at < sample.judged_at and one.trajectory_id != sample.trajectory_id
        ]
        if len(earlier) < least:
            return None
        mean, variance = _moments(earlier)
        cohort = [one for one in earlier if one.cohort == sample.cohort]
        if cohort:
            own, _ = _moments(cohort)
            weight = len(cohort) / (len(cohort) + SHRINKAGE)
            mean = weight * own + (1.0 - weight) * mean
        return Baseline(mean, math.sqrt(variance), len(earlier))


def _moments(scores: Sequence[PastScore]) -> tuple[float, float]:
    """Return (mean, variance) of scores, oldest first, the newer ones weighing more."""
    weights = [0.5 ** ((len(scores) - 1 - place) / HALF_LIFE) for place in range(len(scores))]
    whole = sum(weights)
    mean = sum(weight * one.score for weight, one in zip(weights, scores, strict=True)) / whole
    return mean, sum(w * (one.score - mean) ** 2 for w, one in zip(weights, scores, strict=True)) / whole
