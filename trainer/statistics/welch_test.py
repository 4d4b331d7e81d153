"""Welch's z for a change of a mean, and the two-proportion z for a change of a share. Pure.

The sentinel needs the number of standard errors, not a p-value, and a result for constant values, for which
scipy.stats.ttest_ind(equal_var=False) gives NaN or a warning.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MIN_VALUES = 16  # on either side; with fewer there is no result


@dataclass(frozen=True, slots=True)
class MeanChange:
    """Means before and after, and their difference in standard errors (positive: it grew)."""

    before: float
    after: float
    sigmas: float

    @property
    def ratio(self) -> float:
        """The larger mean over the smaller one, at least 1."""
        low, high = sorted((abs(self.before), abs(self.after)))
        return high / low if low else math.inf if high else 1.0


def mean_change(past: Sequence[float], recent: Sequence[float]) -> MeanChange | None:
    """Return the change from past to recent values; None if either side has too few."""
    if min(len(past), len(recent)) < MIN_VALUES:
        return None
    before, after = statistics.fmean(past), statistics.fmean(recent)
    error = math.sqrt(statistics.variance(past) / len(past) + statistics.variance(recent) / len(recent))
    if error:
        return MeanChange(before, after, (after - before) / error)
    return MeanChange(before, after, math.copysign(math.inf, after - before) if after != before else 0.0)


def share_change(past: tuple[int, int], recent: tuple[int, int]) -> MeanChange | None:
    """Return the change of a share, given as (hits, total): the two-proportion z with a pooled standard error."""
    if min(past[1], recent[1]) < MIN_VALUES:
        return None
    before, after = past[0] / past[1], recent[0] / recent[1]
    pooled = (past[0] + recent[0]) / (past[1] + recent[1])
    error = math.sqrt(pooled * (1 - pooled) * (1 / past[1] + 1 / recent[1]))
    return MeanChange(before, after, (after - before) / error if error else 0.0)
