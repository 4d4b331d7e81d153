"""The running baseline of ungrouped trajectories: earlier scores of the same task family. Pure, in memory.

A baseline uses only scores that were given before the sample's own. It never includes the sample and does not depend on
it (Williams 1992: any such baseline leaves the gradient unbiased). Newer scores have more weight, with a half-life of
`HALF_LIFE` scores, because the policy changes. If other attempts at the same task are known (the cohort), their mean
shrinks towards the family's mean with the weight of `SHRINKAGE` scores.
"""

from __future__ import annotations

import math
import threading
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
    """Mean and standard deviation to compare with, and the number of scores behind them."""

    mean: float
    std: float
    count: int


class ScoreHistory:
    """The scores of one alias and one version of its judge, by task family. Threads may add and read concurrently."""

    def __init__(self, past: Sequence[PastScore] = ()) -> None:
        self._families: dict[str, deque[PastScore]] = {}
        self._lock = threading.Lock()
        for scored in sorted(past, key=lambda one: one.judged_at):
            self.add(scored)

    def add(self, scored: PastScore) -> None:
        """Add a score. It replaces an earlier score of the same trajectory."""
        with self._lock:
            if scored.family not in self._families and len(self._families) >= _MAX_FAMILIES:
                del self._families[next(iter(self._families))]
            scores = self._families.setdefault(scored.family, deque(maxlen=MAX_SCORES_PER_FAMILY))
            for earlier in [one for one in scores if one.trajectory_id == scored.trajectory_id]:
                scores.remove(earlier)
            scores.append(scored)

    def families_with_baseline(self, min_scores: int) -> set[str]:
        """Return the families that have at least `min_scores` scores."""
        with self._lock:
            return {family for family, scores in self._families.items() if len(scores) >= min_scores}

    def baseline(self, sample: PastScore, min_scores: int) -> Baseline | None:
        """Return the baseline for a sample; None if fewer than `min_scores` scores were given before it."""
        with self._lock:
            family = tuple(self._families.get(sample.family, ()))
        earlier = [
            one for one in family if one.judged_at < sample.judged_at and one.trajectory_id != sample.trajectory_id
        ]
        if len(earlier) < min_scores:
            return None
        mean, variance = _moments(earlier)
        cohort = [one for one in earlier if one.cohort == sample.cohort]
        if cohort:
            cohort_mean, _ = _moments(cohort)
            weight = len(cohort) / (len(cohort) + SHRINKAGE)
            mean = weight * cohort_mean + (1.0 - weight) * mean
        return Baseline(mean, math.sqrt(variance), len(earlier))


def _moments(scores: Sequence[PastScore]) -> tuple[float, float]:
    """Return the weighted (mean, variance) of scores, oldest first."""
    weights = [0.5 ** ((len(scores) - 1 - place) / HALF_LIFE) for place in range(len(scores))]
    total = sum(weights)
    mean = sum(weight * one.score for weight, one in zip(weights, scores, strict=True)) / total
    return mean, sum(w * (one.score - mean) ** 2 for w, one in zip(weights, scores, strict=True)) / total
