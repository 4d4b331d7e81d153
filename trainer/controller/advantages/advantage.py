"""Advantages: how much better each member of a group did than the group, or a single than those before it.

Pure functions from scores to advantages, by the names that the field gives them. Promises finite numbers in the order
of the scores, and all zeros where the scores do not differ. Does not judge, group or build rows.

    grpo         A_i = (r_i - mean(r)) / std(r): Shao et al. 2024, "DeepSeekMath", section 4.1.2 (arXiv:2402.03300);
                 the standard deviation is the sample's (G - 1), as in TRL
    dr_grpo      A_i = r_i - mean(r): no bias towards groups of little spread, Liu et al. 2025 (arXiv:2503.20783)
    rloo         A_i = r_i - mean of the others: Ahmadian et al. 2024 (arXiv:2402.14740)
    reinforce++  A_i = r_i - mean(r), then divided by the standard deviation over the round: the variant with a group
                 baseline of Hu et al. 2025 (arXiv:2501.03262)
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from ratchet.trainer.errors import ScoreError
from ratchet.trainer.statistics.score_spread import has_signal

CREDITS = ("grpo", "dr_grpo", "rloo", "reinforce++")


# Added to the standard deviation, as TRL does, so that a tiny spread does not become a large advantage.
STD_FLOOR = 1e-4

# A single that differs from hundreds of equal ones is no hundred times better than they are.
MAX_SINGLE_ADVANTAGE = 5.0


def group_advantages(scores: Sequence[float], credit: str = "grpo") -> tuple[float, ...]:
    """Return the advantages of G scores, (G,) -> (G,), before what `scale_over_round` does.

    A group without variance gives zeros. Raises ScoreError when a score is not finite.
    """
    if not all(map(math.isfinite, scores)):
        raise ScoreError(f"scores {list(scores)} are not all finite: a failed verdict is a state, not a score")
    if not has_signal(scores):
        return (0.0,) * len(scores)
    mean = statistics.fmean(scores)
    scale = 1.0
    if credit == "grpo":
        scale = statistics.stdev(scores) + STD_FLOOR
    elif credit == "rloo":  # r_i - (sum - r_i) / (G - 1) = (r_i - mean) G / (G - 1)
        scale = (len(scores) - 1) / len(scores)
    return tuple((score - mean) / scale for score in scores)


def cohort_advantages(scores: Sequence[float], credit: str = "grpo") -> tuple[float, ...]:
    """Return the advantages of G scores of different tasks, (G,) -> (G,): each over the mean of the others.

    That mean does not depend on the member's own score, as a baseline must not. Divided by the cohort's standard
    deviation where `credit` divides by a group's.
    """
    over_others = group_advantages(scores, "rloo")
    scale = statistics.stdev(scores) + STD_FLOOR if credit == "grpo" and has_signal(scores) else 1.0
    return tuple(advantage / scale for advantage in over_others)


def single_advantage(score: float, mean: float, std: float, credit: str = "grpo") -> float:
    """Return the advantage of a single over the running baseline of its family, which never includes it.

    Divided by the family's standard deviation where `credit` divides by the group's.
    """
    advantage = (score - mean) / (std + STD_FLOOR if credit == "grpo" else 1.0)
    return max(-MAX_SINGLE_ADVANTAGE, min(MAX_SINGLE_ADVANTAGE, advantage))


def scale_over_round(advantages: Sequence[tuple[str, float]], credit: str, *, by_family: bool) -> list[float]:
    """Return the advantages of a round's trajectories, given as (task family, advantage).

    reinforce++ divides by the standard deviation of the round. `by_family` divides those of each family by their own,
    whatever the credit, so that a family with large scores does not drown the others.
    """
    if credit != "reinforce++" and not by_family:
        return [advantage for _, advantage in advantages]
    families: dict[str, list[float]] = {}
    for family, advantage in advantages:
        families.setdefault(family if by_family else "", []).append(advantage)
    scales: Mapping[str, float] = {name: _spread(values) for name, values in families.items()}
    return [advantage / scales[family if by_family else ""] for family, advantage in advantages]


def _spread(values: Sequence[float]) -> float:
    """Return the root mean square of centred advantages, never so little that it would blow them up."""
    return max(math.sqrt(statistics.fmean(value * value for value in values)), STD_FLOOR)
