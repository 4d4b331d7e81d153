"""Advantages: how much better each member of a group did than the group, or a single than earlier trajectories.

Pure functions from scores to advantages, named as in the literature. They return finite numbers in the order of the
scores, and zeros if the scores do not differ by more than the judge's `noise`, the standard deviation of its scores of
one and the same answer (trainer/statistics/score_spread.py).

    grpo         A_i = (r_i - mean(r)) / std(r): Shao et al. 2024, "DeepSeekMath", section 4.1.2 (arXiv:2402.03300);
                 the sample standard deviation (G - 1), as in TRL, but at least 5 times the noise: of an advantage at
                 most 0.2 (one standard deviation) is noise
    dr_grpo      A_i = r_i - mean(r): no bias towards groups of little spread, Liu et al. 2025 (arXiv:2503.20783)
    rloo         A_i = r_i - mean of the others: Ahmadian et al. 2024 (arXiv:2402.14740)
    reinforce++  A_i = r_i - mean(r), then divided by the standard deviation over the round: the variant with a group
                 baseline of Hu et al. 2025 (arXiv:2501.03262), with the same floor

Other packages register their own: `ratchet.trainer.settings.estimators`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from ratchet.trainer.errors import PluginError, ScoreError
from ratchet.trainer.settings.estimators import DEFAULT_ESTIMATOR, AdvantageFunctions, find_estimator
from ratchet.trainer.statistics.score_spread import differs, has_signal

# Added to the standard deviation, as in TRL: a tiny spread must not become a large advantage.
STD_FLOOR = 1e-4
NOISE_FLOOR = 5.0  # times the judge's noise: no smaller standard deviation divides an advantage

# A single that differs from hundreds of equal scores is not a hundred times better than they are.
MAX_SINGLE_ADVANTAGE = 5.0


def group_advantages(
    scores: Sequence[float], estimator: str = DEFAULT_ESTIMATOR, noise: float = 0.0
) -> tuple[float, ...]:
    """Return the advantages of G scores, (G,) -> (G,), before `scale_over_round`.

    A group without variance gives zeros. Raises ScoreError if a score is not finite.
    """
    if not all(map(math.isfinite, scores)):
        raise ScoreError(f"scores {list(scores)} are not all finite: a failed verdict is a state, not a score")
    if not has_signal(scores, noise):
        return (0.0,) * len(scores)
    plugin = find_estimator(estimator)
    if plugin is not None:
        return _of_plugin(plugin, scores, estimator)
    mean = statistics.fmean(scores)
    scale = 1.0
    if estimator == "grpo":
        scale = _floored(statistics.stdev(scores), noise)
    elif estimator == "rloo":  # r_i - (sum - r_i) / (G - 1) = (r_i - mean) G / (G - 1)
        scale = (len(scores) - 1) / len(scores)
    return tuple((score - mean) / scale for score in scores)


def cohort_advantages(
    scores: Sequence[float], estimator: str = DEFAULT_ESTIMATOR, noise: float = 0.0
) -> tuple[float, ...]:
    """Return the advantages of G scores of different tasks, (G,) -> (G,): each relative to the mean of the others.

    That mean does not depend on the member's own score, as a baseline must not. grpo divides by the cohort's standard
    deviation.
    """
    over_others = group_advantages(scores, "rloo", noise)
    scale = _floored(statistics.stdev(scores), noise) if estimator == "grpo" and any(over_others) else 1.0
    return tuple(advantage / scale for advantage in over_others)


def single_advantage(
    score: float, mean: float, std: float, estimator: str = DEFAULT_ESTIMATOR, noise: float = 0.0
) -> float:
    """Return the advantage of a single over the running baseline of its family, which never includes it.

    grpo divides by the family's standard deviation.
    """
    if not differs(score, mean, noise):
        return 0.0
    advantage = (score - mean) / (_floored(std, noise) if estimator == "grpo" else 1.0)
    return max(-MAX_SINGLE_ADVANTAGE, min(MAX_SINGLE_ADVANTAGE, advantage))


def scale_over_round(
    advantages: Sequence[tuple[str, float]], estimator: str, *, by_family: bool, noise: float = 0.0
) -> list[float]:
    """Return the scaled advantages of a round's trajectories, given as (task family, advantage).

    reinforce++ divides by the standard deviation of the round. With `by_family`, every estimator divides the advantages
    of each family by their own standard deviation: a family with large scores does not dominate the others.
    """
    if estimator != "reinforce++" and not by_family:
        return [advantage for _, advantage in advantages]
    families: dict[str, list[float]] = {}
    for family, advantage in advantages:
        families.setdefault(family if by_family else "", []).append(advantage)
    least = 1.0 if estimator == "grpo" else NOISE_FLOOR * noise  # grpo's are no scores, and have their floor already
    scales: Mapping[str, float] = {name: _spread(values, least) for name, values in families.items()}
    return [advantage / scales[family if by_family else ""] for family, advantage in advantages]


def _of_plugin(plugin: AdvantageFunctions, scores: Sequence[float], name: str) -> tuple[float, ...]:
    """Return a plug-in's advantages. Raises PluginError if they are not one finite number for each score."""
    found = tuple(float(advantage) for advantage in plugin.group(tuple(scores)))
    if len(found) != len(scores) or not all(map(math.isfinite, found)):
        raise PluginError(
            f"advantage estimator {name!r} returned {list(found)} for {len(scores)} scores: it must return one finite "
            "number for each; correct the plug-in, or set trainer.advantage_estimator to a built-in one"
        )
    return found


def _floored(std: float, noise: float) -> float:
    return max(std, NOISE_FLOOR * noise) + STD_FLOOR


def _spread(values: Sequence[float], least: float) -> float:
    """Return the root mean square of centred advantages, at least STD_FLOOR and `least`."""
    return max(math.sqrt(statistics.fmean(value * value for value in values)), least, STD_FLOOR)
