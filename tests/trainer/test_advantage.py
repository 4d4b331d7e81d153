"""Advantages: by group, whitened, and the sign-flip test that compares two versions."""

from __future__ import annotations

import math
import random
import statistics
import sys
from dataclasses import replace

import pytest

from ratchet.trainer.advantages import (
    MAX_SINGLE_ADVANTAGE,
    cohort_advantages,
    group_advantages,
    scale_over_round,
    single_advantage,
)
from ratchet.trainer.errors import TrainerError, TuningError
from ratchet.trainer.learner.loss import whiten
from ratchet.trainer.settings.objectives import BUILT_IN, DEFAULT_ESTIMATOR
from ratchet.trainer.statistics import has_signal, holm, sign_flip_p
from tests.harness.trainer.tiny import build_rows


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
    with pytest.raises(TrainerError, match="not all finite"):
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


def test_every_trained_token_counts_once_in_mean_and_variance() -> None:
    rows = [*build_rows(5)]
    rows[1] = replace(rows[1], advantages=tuple(float(place) for place in range(len(rows[1].ids))))
    white = whiten(rows)
    each = [
        advantage
        for row in white
        for advantage, trained in zip(row.advantages or (row.advantage,) * len(row.ids), row.mask, strict=True)
        if trained
    ]
    assert sum(each) / len(each) == pytest.approx(0.0, abs=1e-9)
    assert sum(value * value for value in each) / len(each) == pytest.approx(1.0)
    assert [row.ids for row in white] == [row.ids for row in rows]


def test_a_round_of_equal_advantages_becomes_zeros() -> None:
    rows = [replace(row, advantage=0.7 + 1e-9 * place) for place, row in enumerate(build_rows(3))]
    assert [row.advantage for row in whiten(rows)] == pytest.approx([0.0] * 3, abs=1e-12)
    assert not any(row.has_signal for row in whiten([replace(row, advantage=0.5) for row in rows]))


def no_gain(chance: random.Random) -> float:
    """The difference of two equal agents on a task of any difficulty, four attempts each."""
    easy = chance.uniform(0.1, 0.8)
    return statistics.fmean((chance.random() < easy) - (chance.random() < easy) for _ in range(4))


def test_one_difference_is_no_evidence() -> None:
    assert sign_flip_p([1.0]) == 1.0


def test_without_scipy_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)  # as if it were not installed
    with pytest.raises(TuningError, match=r"needs scipy.*\[trainer\]"):
        sign_flip_p([1.0, 0.5])


def test_few_differences_are_tested_exactly() -> None:
    assert sign_flip_p([0.5] * 5) == 2 / 2**5
    assert sign_flip_p([0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.0, 0.0]) == 2 / 2**6
    assert sign_flip_p([1.0, -1.0, 0.0]) == 1.0
    assert sign_flip_p([]) == 1.0


def test_a_drawn_p_value_is_that_of_the_exact_test() -> None:
    gains = [0.5, -0.3, 0.8, 0.1, -0.2, 0.4, 0.6, -0.1, 0.3, 0.2, 0.05, -0.4, 0.7]
    more = [*gains, 1e-9]  # one more difference, too small to matter: scipy samples signs
    assert sign_flip_p(more) == pytest.approx(sign_flip_p(gains), abs=0.015)
    assert sign_flip_p([0.5] * 40) == 2 / 10_000  # twice the smaller tail


def test_equal_agents_differ_significantly_in_about_one_of_twenty_comparisons() -> None:
    chance = random.Random(3)
    shown = sum(sign_flip_p([no_gain(chance) for _ in range(12)]) < 0.05 for _ in range(300))
    assert shown <= 0.08 * 300


def test_holm_corrects_the_smallest_most_and_keeps_the_order() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []
