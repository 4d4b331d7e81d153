"""The smallest difference between scores that counts as one, by the judge's noise. Pure.

The noise is the standard deviation of a judge's scores of one and the same answer. If a group's answers are equally
good, (G - 1) s^2 / noise^2, with its sample variance s^2, has the chi-squared distribution of G - 1 degrees of freedom,
so a spread counts as signal if noise would pass it with a probability below 1 in 1,000. AdamW moves the weights as far
by a round of noise as by one of signal, however small the advantages: only leaving the group out helps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

MIN_SCORE_SPREAD = 1e-6  # judges are not exact to more digits
_Z = 3.09  # of a standard normal distribution, passed with a probability of 0.001 on one side
_Z_TWO_SIDED = 3.29


def has_signal(scores: Sequence[float], noise: float = 0.0) -> bool:
    """Whether the scores of a group differ by more than the judge's noise, so that training can use them."""
    if len(scores) < 2 or max(scores) - min(scores) <= MIN_SCORE_SPREAD:
        return False
    return statistics.stdev(scores) > noise * math.sqrt(_largest_ratio(len(scores) - 1))


def differs(score: float, mean: float, noise: float = 0.0) -> bool:
    """Whether a score differs from the mean of many earlier ones by more than the judge's noise."""
    return abs(score - mean) > max(MIN_SCORE_SPREAD, _Z_TWO_SIDED * noise)


def _largest_ratio(freedom: int) -> float:
    """Return the 0.999 quantile of chi-squared over its degrees of freedom: Wilson and Hilferty 1931, within 4%."""
    spread = 2 / (9 * freedom)
    return (1 - spread + _Z * math.sqrt(spread)) ** 3
