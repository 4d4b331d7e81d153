"""Claims about advantages."""

from __future__ import annotations

import math
import statistics

import pytest

from ratchet.trainer.controller.advantages.advantage import (
    MAX_SINGLE_ADVANTAGE,
    group_advantages,
    scale_over_round,
    single_advantage,
)
from ratchet.trainer.errors import ScoreError
from ratchet.trainer.statistics.score_spread import has_signal


def test_advantages_are_the_papers_normalised_scores() -> None:
    scores = [0.0, 0.25, 1.0]
    mean, std = statistics.fmean(scores), statistics.stdev(scores)
    assert group_advantages(scores) == pytest.approx([(s - mean) / (std + 1e-4) for s in scores])


def test_advantages_sum_to_zero_and_keep_the_order_of_the_scores() -> None:
    advantages = group_advantages([0.3, 0.9, 0.1, 0.4])
    assert sum(advantages) == pytest.approx(0.0, abs=1e-12)
    assert sorted(advantages) == [advantages[2], advantages[0], advantages[3], advantages[1]]


def test_without_the_standard_deviation_a_small_spread_stays_small() -> None:
    assert group_advantages([0.5, 0.6], "dr_grpo") == pytest.approx([-0.05, 0.05])


@pytest.mark.parametrize("scores", [[], [0.7], [0.7, 0.7, 0.7], [0.1 + 0.2, 0.3]])
def test_a_group_without_variance_has_no_signal_and_zero_advantages(scores: list[float]) -> None:
    assert not has_signal(scores)
    assert group_advantages(scores) == (0.0,) * len(scores)


def test_a_score_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ScoreError, match="not all finite"):
        group_advantages([0.1, math.nan])


def test_rloo_compares_each_with_the_mean_of_the_others() -> None:
    scores = [0.0, 0.25, 1.0]
    others = [statistics.fmean(scores[:place] + scores[place + 1 :]) for place in range(3)]
    expected = [score - other for score, other in zip(scores, others, strict=True)]
    assert group_advantages(scores, "rloo") == pytest.approx(expected)


def test_reinforce_pp_divides_by_the_spread_of_the_whole_round() -> None:
    groups = [group_advantages(scores, "reinforce++") for scores in ([0.0, 1.0], [0.4, 0.6])]
    flat = [("f", advantage) for group in groups for advantage in group]
    scaled = scale_over_round(flat, "reinforce++", by_family=False)
    assert statistics.fmean(value * value for value in scaled) == pytest.approx(1.0)
    assert scaled[1] / scaled[3] == pytest.approx(5.0)  # groups of little spread stay small


def test_families_of_large_scores_do_not_drown_the_others() -> None:
    mixed = [("math", -50.0), ("math", 50.0), ("mail", -0.1), ("mail", 0.1)]
    assert scale_over_round(mixed, "dr_grpo", by_family=True) == pytest.approx([-1.0, 1.0, -1.0, 1.0])
    assert scale_over_round(mixed, "dr_grpo", by_family=False) == [-50.0, 50.0, -0.1, 0.1]


def test_a_single_among_equals_is_not_a_hundred_times_better() -> None:
    assert single_advantage(1.0, mean=0.0, std=0.0) == MAX_SINGLE_ADVANTAGE
    assert single_advantage(0.75, mean=0.5, std=0.25, estimator="dr_grpo") == 0.25
