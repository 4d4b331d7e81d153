"""The radius of an interval for a mean that may be looked at after every score. Pure.

The interval is an asymptotic confidence sequence: it holds the true mean at all times together with probability
1 - alpha, not only at one time that was chosen before (Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas 2021, "Time-
uniform central limit theory and asymptotic confidence sequences", arXiv:2103.06476, theorem 2.2). For the difference of
two streams of n and m scores, t = n m / (n + m) is the size of one stream with the same variance of the mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_TIGHTEST_AT = 100.0  # scores at which the interval is narrowest for its guarantee


@dataclass(frozen=True, slots=True)
class MeanDifference:
    """Mean score of newer versions minus that of an older one, with an interval that holds at all times (95%)."""

    value: float
    low: float
    high: float
    count: int


def boundary(t: float, alpha: float) -> float:
    """Return the radius of the sequence for unit variance after t scores."""
    aim = -2.0 * math.log(alpha)
    rho2 = (aim + math.log(aim) + 1.0) / _TIGHTEST_AT
    return math.sqrt(2.0 * (t * rho2 + 1.0) / (t * t * rho2) * math.log(math.sqrt(t * rho2 + 1.0) / alpha))
