"""The smallest difference between two scores that counts as one."""

from __future__ import annotations

from collections.abc import Sequence

MIN_SCORE_SPREAD = 1e-6  # judges are not exact to more digits


def has_signal(scores: Sequence[float]) -> bool:
    """Whether the scores of a group differ, so that training can use them."""
    return len(scores) > 1 and max(scores) - min(scores) > MIN_SCORE_SPREAD
