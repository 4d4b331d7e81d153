"""Has a mean changed? Welch's z between what was and what is. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEAST = 16  # values on either side; with fewer nothing is said


@dataclass(frozen=True, slots=True)
class Change:
    """Means before and after, and how many standard errors lie between them (positive: it grew)."""

    before: float
    after: float
    sigmas: float

    @property
    def ratio(self) -> float:
        """How many times larger one is than the other, at least 1."""
        low, high = sorted((abs(self.before), abs(self.after)))
        return high / low if low else math.inf if high else 1.0


def change(past: Sequence[float], recent: Sequence[float]) -> Change | None:
    """Return the change from past to recent values; None where either side is too small to tell."""
    if min(len(past), len(recent)) < LEAST:
        return None
    before, after = statistics.fmean(past), statistics.fmean(recent)
    error = math.sqrt(statistics.variance(past) / len(past) + statistics.variance(recent) / len(recent))
    if error:
        return Change(before, after, (after - before) / error)
    return Change(before, after, math.copysign(math.inf, after - before) if after != before else 0.0)


def share_change(past: tuple[int, int], recent: tuple[int, int]) -> Change | None:
    """Return the change of a share, each given as (hits, of): the two-proportion z with a pooled standard error."""
    if min(past[1], recent[1]) < LEAST:
        return None
    before, after = past[0] / past[1], recent[0] / recent[1]
    pooled = (past[0] + recent[0]) / (past[1] + recent[1])
    error = math.sqrt(pooled * (1 - pooled) * (1 / past[1] + 1 / recent[1]))
    return Change(before, after, (after - before) / error if error else 0.0)
