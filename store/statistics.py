"""Which numbers are scores, and confidence intervals of their mean that are valid for few values. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

# Which numbers are scores: finite ones up to MAX_SCORE, because statistics add up their squares. Pure.

MAX_SCORE = 1e9  # absolute
SCORE_RANGE = f"from {-MAX_SCORE:g} to {MAX_SCORE:g}"  # in messages


def number_of(value: Any) -> float | None:
    """Return a finite number of at most MAX_SCORE, in absolute terms, as a float; None for any other value.

    A number is what has `__float__`: also a bool, a Decimal, and an array of numpy or torch with one element.
    """
    if not hasattr(type(value), "__float__"):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # such as an array with several elements
        return None
    return number if abs(number) <= MAX_SCORE else None  # false for nan


# Confidence intervals of a mean that are valid for few values. Pure.
#
# The interval is Student's t with two half observations added to the variance, one at each end of the range of the
# scores, as Agresti and Min add half a pair to each cell (2005, "Simple improved confidence intervals for comparing
# matched proportions", Statistics in Medicine 24). Equal differences are weak evidence: without the half observations,
# five ties would be an exact zero, and a model that fails one task in fifty as good as one that never fails. In
# simulations over 4 to 100 tasks (`benchmarks/coverage.py`) the interval covers the true value in 87% of the worst case
# and in 92% to 100% of all others; plain t falls to 9%.
#
# Student's quantile is computed here, since the proxy and `ratchet status` report with it. It equals scipy.stats.t.ppf
# to 1e-8, from 400 degrees of freedom on to 0.006 (a test compares them). scipy would add 216 MB to the base package's
# installation, 87 MB of memory to the proxy and 0.6 s to the first report.

CONFIDENCE = 0.95
_NORMAL_FROM = 400  # degrees of freedom from which the normal distribution is used


def student_t(confidence: float, degrees: int) -> float:
    """Return the half width of a two-sided interval in standard errors (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    if degrees >= _NORMAL_FROM:
        return statistics.NormalDist().inv_cdf((1 + confidence) / 2)
    low, high = 0.0, 1.0
    while _within(high, degrees) < confidence:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < confidence else (low, middle)
    return high


def _within(t: float, degrees: int) -> float:
    """Return the probability that |T| < t."""
    angle = math.atan(t / math.sqrt(degrees))
    cosine = math.cos(angle)
    odd = degrees % 2
    term = total = cosine if odd else 1.0
    for k in range(2 if odd else 1, degrees - 1, 2):
        term *= cosine * cosine * k / (k + 1)
        total += term
    if not odd:
        return math.sin(angle) * total
    return 2 / math.pi * (angle + (math.sin(angle) * total if degrees > 1 else 0.0))


@dataclass(frozen=True, slots=True)
class Sums:
    """The sufficient statistics of an interval: count, sum and sum of squares."""

    count: int
    total: float
    squares: float

    def around(self, middle: float) -> Sums:
        """Return the sums of the values minus `middle`."""
        squares = self.squares - 2 * middle * self.total + self.count * middle * middle
        return Sums(self.count, self.total - self.count * middle, max(0.0, squares))

    @property
    def mean(self) -> float:
        """The mean of at least one value."""
        return self.total / self.count


def sums_of(values: Iterable[float]) -> Sums:
    numbers = list(values)
    return Sums(len(numbers), math.fsum(numbers), math.fsum(number * number for number in numbers))


def interval(values: Sequence[float], spread: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the interval of the mean of at least one value; `spread`: the largest possible absolute value.

    No interval is wider than -spread to spread, which is the interval of a single value.
    """
    return interval_of(sums_of(values), spread, confidence)


def interval_of(sums: Sums, spread: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the interval of values of which only the sums are known."""
    if sums.count < 2:
        return -spread, spread
    reach = student_t(confidence, sums.count - 1) * math.sqrt(squared_error(sums, spread))
    return max(-spread, sums.mean - reach), min(spread, sums.mean + reach)


def squared_error(sums: Sums, spread: float) -> float:
    """Return the squared standard error of the mean, including the two half observations."""
    shrunk = sums.total / (sums.count + 1)
    squares = sums.around(shrunk).squares
    least, largest = spread - shrunk, spread + shrunk
    squares += (least * least + largest * largest) / 2  # not ** 2, which raises where a product is infinite
    return squares / sums.count / sums.count


def wilson(successes: float, count: int) -> tuple[float, float]:
    """Return the 95% Wilson score interval of a share (Wilson 1927); (0, 1) without data."""
    if not count:
        return 0.0, 1.0
    z, share = 1.959964, successes / count
    middle, scale = share + z * z / (2 * count), 1 + z * z / count
    reach = z * math.sqrt((share * (1 - share) + z * z / (4 * count)) / count)
    return max(0.0, (middle - reach) / scale), min(1.0, (middle + reach) / scale)


def nearest_rank(ordered: Sequence[float], share: float) -> float:
    """Return a percentile of ascending values: the smallest that at least this share of them does not exceed."""
    return ordered[max(1, math.ceil(share * len(ordered))) - 1]
