"""A sequential test for the difference of two means, sound however often it is looked at. Pure.

The interval is an asymptotic confidence sequence: it holds the true difference at all times together with probability
1 - alpha, not only at one time that was chosen before (Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas 2021, "Time-
uniform central limit theory and asymptotic confidence sequences", arXiv:2103.06476, theorem 2.2). For two streams of n
and m scores, t = n m / (n + m) is the size of one stream with the same variance of the mean. `tests` hold the rate of
false alarms under continuous looking to alpha.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_TIGHTEST_AT = 100.0  # effective scores at which the interval is narrowest for its guarantee


@dataclass(frozen=True, slots=True)
class Difference:
    """mean(new) - mean(old) with an interval that holds at all times."""

    value: float
    low: float
    high: float
    new_count: int
    old_count: int


def difference(new: Sequence[float], old: Sequence[float], alpha: float) -> Difference:
    """Return the difference of means of two streams of at least two scores each."""
    n, m = len(new), len(old)
    value = math.fsum(new) / n - math.fsum(old) / m
    effective = n * m / (n + m)
    variance = (_variance(new, old) / n + _variance(old, new) / m) * effective
    radius = math.sqrt(variance) * boundary(effective, alpha)
    return Difference(value, value - radius, value + radius, n, m)


def boundary(t: float, alpha: float) -> float:
    """Return the radius of the sequence for unit variance after t scores."""
    aim = -2.0 * math.log(alpha)
    rho2 = (aim + math.log(aim) + 1.0) / _TIGHTEST_AT
    return math.sqrt(2.0 * (t * rho2 + 1.0) / (t * t * rho2) * math.log(math.sqrt(t * rho2 + 1.0) / alpha))


def _variance(scores: Sequence[float], others: Sequence[float]) -> float:
    """Return the sample variance as if one more score lay at the far end of the range: equal scores prove little."""
    low, high = min(min(scores), min(others)), max(max(scores), max(others))
    if low == high:
        low = high - 1.0  # the range is not known yet; most scores lie between 0 and 1
    mean = math.fsum(scores) / len(scores)
    far = high if high - mean > mean - low else low
    count = len(scores) + 1
    mean = (math.fsum(scores) + far) / count
    return math.fsum((score - mean) ** 2 for score in (*scores, far)) / (count - 1)
