"""Claims about advantages."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from ratchet.trainer.controller.advantages import (
    MAX_SINGLE_ADVANTAGE,
    cohort_advantages,
    group_advantages,
    scale_over_round,
    single_advantage,
)
from ratchet.trainer.errors import ScoreError
from ratchet.trainer.settings.objectives import BUILT_IN, DEFAULT_ESTIMATOR
from ratchet.trainer.statistics import has_signal


def test_advantages_are_the_papers_normalised_scores() -> None:
    scores = [0.0, 0.25, 1.0]
    mean, std = statistics.fmean(scores), statistics.stdev(scores)
    assert group_advantages(scores, "grpo") == pytest.approx([(s - mean) / (std + 1e-4) for s in scores])


def test_advantages_sum_to_zero_and_keep_the_order_of_the_scores() -> None:
    advantages = group_advantages([0.3, 0.9, 0.1, 0.4])
    assert sum(advantages) == pytest.approx(0.0, abs=1e-12)
    assert sorted(advantages) == [advantages[2], advantages[0], advantages[3], advantages[1]]


def test_without_the_standard_deviation_a_small_spread_stays_small() -> None:
    assert group_advantages([0.5, 0.6]) == pytest.approx([-0.05, 0.05])


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
    assert single_advantage(1.0, mean=0.0, std=0.0, estimator="grpo") == MAX_SINGLE_ADVANTAGE
    assert single_advantage(0.75, mean=0.5, std=0.25, estimator="dr_grpo") == 0.25


NOISE = 0.02
GROUPS, SIZE = 2000, 8


def of_round(groups: list[list[float]], estimator: str, noise: float) -> list[float]:
    """The advantages of all members of a round, as its rows get them."""
    flat = [("f", one) for scores in groups for one in group_advantages(scores, estimator, noise)]
    return scale_over_round(flat, estimator, by_family=False, noise=noise)


def equal_answers(seed: int = 0, noise: float = NOISE) -> list[list[float]]:
    """Groups of equally good answers, as a judge with this noise scores them."""
    dice = random.Random(seed)
    return [[0.7 + dice.gauss(0, noise) for _ in range(SIZE)] for _ in range(GROUPS)]


@pytest.mark.parametrize("estimator", BUILT_IN)
def test_a_judges_noise_is_no_signal(estimator: str) -> None:
    groups = equal_answers()
    assert statistics.fmean(map(abs, of_round(groups, estimator, NOISE))) < 0.005
    assert sum(any(group_advantages(scores, estimator, NOISE)) for scores in groups) / GROUPS < 0.003
    alone = [single_advantage(group[0], 0.7, NOISE, estimator, NOISE) for group in groups]
    assert statistics.fmean(map(abs, alone)) < 0.005
    assert (
        statistics.fmean(abs(one) for scores in groups for one in cohort_advantages(scores, estimator, NOISE)) < 0.005
    )


@pytest.mark.parametrize("estimator", BUILT_IN)
def test_a_real_split_is_what_it_is_without_noise(estimator: str) -> None:
    split = [[0.0] * 4 + [1.0] * 4, [0.0] * 7 + [1.0]]
    assert of_round(split, estimator, NOISE) == of_round(split, estimator, 0.0)
    dice = random.Random(1)
    noisy = [[one + dice.gauss(0, NOISE) for one in group] for group in split]
    assert of_round(noisy, estimator, NOISE) == pytest.approx(of_round(split, estimator, 0.0), abs=0.2)
    small = [[0.6] * 4 + [0.7] * 4]  # five times the noise
    assert all(of_round(small, estimator, NOISE))


def test_noise_that_nobody_measured_stays_small_by_default_and_is_blown_up_by_the_standard_deviation() -> None:
    groups = equal_answers()
    assert DEFAULT_ESTIMATOR == "dr_grpo"
    assert statistics.fmean(map(abs, of_round(groups, DEFAULT_ESTIMATOR, 0.0))) < 0.05
    assert statistics.fmean(map(abs, of_round(groups, "rloo", 0.0))) < 0.05
    assert statistics.fmean(map(abs, of_round(groups, "grpo", 0.0))) > 0.7


def test_a_groups_of_any_size_passes_noise_alone_once_in_a_thousand() -> None:
    dice = random.Random(2)
    for size in (2, 3, 8, 16):
        passed = sum(has_signal([dice.gauss(0, NOISE) for _ in range(size)], NOISE) for _ in range(20_000))
        assert 5 <= passed <= 40
