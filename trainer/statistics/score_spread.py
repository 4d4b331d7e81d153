"""Whether scores differ: from which difference on two scores count as two."""

from __future__ import annotations

from collections.abc import Sequence

# Scores that lie closer together than this are the same score: judges are not exact to more digits.
NO_VARIANCE = 1e-6


def has_signal(scores: Sequence[float]) -> bool:
    """Whether the scores of a group differ, so that something can be learnt from it."""
    return len(scores) > 1 and max(scores) - min(scores) > NO_VARIANCE
