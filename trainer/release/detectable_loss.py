"""Which loss the evidence can show after how many trajectories, and the difference from the anchor. Pure.

The median number of counted trajectories until a loss D is shown is 18 s^2 / (f (1 - f) D^2): twice ln(1/alpha) + 2,
for alpha 0.001, with s the standard deviation that is left after the baseline, and f the share of the older of two
versions. One loss in ten takes twice as long. `benchmarks/release.py` measures both.
"""

from __future__ import annotations

import math

from ratchet.trainer.release.evidence import DifferenceSums
from ratchet.trainer.statistics.confidence_sequence import MeanDifference, boundary

PERIODS = (("day", 1.0), ("week", 7.0), ("month", 30.0))
SMALL_TRAFFIC_LOSS = 0.1  # a larger one that a month cannot show: the traffic is too small to guard by itself
_CERTAINTY = 18.0
_MIN_COUNT = 20
_MIN_ROUND, _MAX_ROUND = 128, 512  # trajectories


def mean_difference(seen: DifferenceSums, alpha: float = 0.05) -> MeanDifference | None:
    """Return newer minus older; None for fewer than twenty trajectories."""
    if seen.count < _MIN_COUNT or seen.information <= 0.0:
        return None
    value = -seen.sum / seen.information
    mean = seen.sum / seen.count
    spread = math.sqrt(max(0.0, seen.squares / seen.count - mean * mean))
    radius = spread * boundary(seen.count, alpha) * seen.count / seen.information
    return MeanDifference(value, value - radius, value + radius, seen.count)


def detectable_loss(per_day: float, days: float, spread: float, older: float, newer: float) -> float:
    """Return the loss that is shown in `days` in the median, for two versions with these shares of all traffic."""
    trajectories = per_day * days * (older + newer)
    if trajectories <= 0.0 or older <= 0.0 or newer <= 0.0:
        return math.inf
    f = older / (older + newer)
    return spread * math.sqrt(_CERTAINTY / (f * (1.0 - f) * trajectories))


def is_traffic_too_small(per_day: float, spread: float, holdback: float = 0.3) -> bool:
    """Return whether a month of this traffic cannot show a loss of `SMALL_TRAFFIC_LOSS` against the anchor."""
    return detectable_loss(per_day, 30.0, spread, holdback, 1.0 - holdback) > SMALL_TRAFFIC_LOSS


def deserved_round_size(per_day: float) -> int:
    """Return a day of traffic, between 128 and 512 trajectories.

    A release is judged by about as many trajectories as its round has, so a larger round makes one that can be judged,
    but fewer of them. `benchmarks.release --only rounds` measures what that is worth.
    """
    return round(max(_MIN_ROUND, min(_MAX_ROUND, per_day)))
