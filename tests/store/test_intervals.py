"""Intervals hold the truth as often as they say, for few tasks too; the test is exact; Holm's order holds."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable

import pytest

from ratchet.store.statistics import holm, interval, sign_flip_p, student_t


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (5, 2.5706), (10, 2.2281), (30, 2.0423), (1000, 1.96)],
)
def test_students_quantiles_are_those_of_the_tables(degrees: int, quantile: float) -> None:
    assert student_t(0.95, degrees) == pytest.approx(quantile, abs=1e-3)


def agents(better: float, worse: float) -> Callable[[random.Random], float]:
    """A task's difference of two agents that succeed or fail."""
    return lambda chance: (chance.random() < better) - (chance.random() < worse)


def hard_and_easy(gain: float) -> Callable[[random.Random], float]:
    """Tasks of every difficulty, four attempts each; one agent is better by `gain` at each."""

    def one(chance: random.Random) -> float:
        easy = chance.uniform(0.1, 0.8)
        return statistics.fmean((chance.random() < easy + gain) - (chance.random() < easy) for _ in range(4))

    return one


CASES = [
    (agents(0.5, 0.5), 0.0), (agents(0.97, 0.9), 0.07), (agents(0.02, 0.0), 0.02), (agents(0.05, 0.0), 0.05),
    (hard_and_easy(0.1), 0.1), (lambda chance: chance.gauss(0.1, 0.3), 0.1),
]  # fmt: skip


@pytest.mark.parametrize("tasks", [4, 10, 30])
@pytest.mark.parametrize(("draw", "truth"), CASES)
def test_the_interval_holds_the_truth_for_few_tasks_and_rare_differences(
    draw: Callable[[random.Random], float], truth: float, tasks: int
) -> None:
    chance = random.Random(tasks)
    held = 0
    for _ in range(300):
        low, high = interval([draw(chance) for _ in range(tasks)], 1.0)
        held += low <= truth <= high
    assert held >= 0.92 * 300


def test_equal_differences_prove_little_and_more_of_them_more() -> None:
    few, many = interval([0.0] * 5, 1.0), interval([0.0] * 500, 1.0)
    assert few[0] < -0.3 < 0.3 < few[1]
    assert -0.01 < many[0] < 0.0 < many[1] < 0.01


def test_one_task_shows_nothing() -> None:
    assert interval([1.0], 1.0) == (-1.0, 1.0)
    assert sign_flip_p([1.0]) == 1.0


def test_few_differences_are_tested_exactly() -> None:
    assert sign_flip_p([0.5] * 5) == 2 / 2**5
    assert sign_flip_p([0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.0, 0.0]) == 2 / 2**6
    assert sign_flip_p([1.0, -1.0, 0.0]) == 1.0
    assert sign_flip_p([]) == 1.0


def test_a_drawn_p_value_is_that_of_the_exact_test() -> None:
    gains = [0.5, -0.3, 0.8, 0.1, -0.2, 0.4, 0.6, -0.1, 0.3, 0.2, 0.05, -0.4, 0.7]
    more = [*gains, 1e-9]  # one more that weighs nothing: signs are drawn now
    assert sign_flip_p(more) == pytest.approx(sign_flip_p(gains), abs=0.015)
    assert sign_flip_p([0.5] * 40) == 1 / 10_000


def test_equal_agents_are_distinguished_in_at_most_one_of_twenty_cases() -> None:
    chance = random.Random(3)
    draw = hard_and_easy(0.0)
    shown = sum(sign_flip_p([draw(chance) for _ in range(12)]) < 0.05 for _ in range(300))
    assert shown <= 0.08 * 300


def test_holm_corrects_the_smallest_most_and_keeps_the_order() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []
