"""Advantages: how much better each member of a group did than the group.

Pure functions from scores to advantages; a new credit scheme (RLOO, REINFORCE++) is one more function here with the
same shape, `Sequence[float] -> tuple[float, ...]`, and nothing else in the trainer changes. Promises finite numbers in
the order of the scores, and all zeros where the scores do not differ. Does not judge, group or build rows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from trainer.errors import ScoreError

# Scores that lie closer together than this are the same score: judges are not exact to more digits.
NO_VARIANCE = 1e-6

# Added to the standard deviation, as TRL does, so that a tiny spread does not become a large advantage.
STD_FLOOR = 1e-4


def has_signal(scores: Sequence[float]) -> bool:
    """Whether the scores of a group differ, so that something can be learnt from it."""
    return len(scores) > 1 and max(scores) - min(scores) > NO_VARIANCE


def group_advantages(scores: Sequence[float], *, scale_by_std: bool = True) -> tuple[float, ...]:
    """Group-relative advantages of G scores, (G,) -> (G,).

    A_i = (r_i - mean(r)) / std(r): GRPO, Shao et al. 2024, "DeepSeekMath", section 4.1.2 (arXiv:2402.03300). The
    standard deviation is the sample's (G - 1), as in TRL. With `scale_by_std=False` the division is left out, which
    removes the bias towards groups of little spread: Liu et al. 2025, "Dr. GRPO" (arXiv:2503.20783).

    A group without variance gives zeros. Raises ScoreError when a score is not finite.
    """
    if not all(map(math.isfinite, scores)):
        raise ScoreError(f"scores {list(scores)} are not all finite: a failed verdict is a state, not a score")
    if not has_signal(scores):
        return (0.0,) * len(scores)
    mean = statistics.fmean(scores)
    scale = statistics.stdev(scores) + STD_FLOOR if scale_by_std else 1.0
    return tuple((score - mean) / scale for score in scores)
