"""Intervals cover the true value as often as they claim, for few tasks too."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable

import pytest

from ratchet.store.statistics import interval, student_t


def test_numbers_whose_squares_are_infinite_have_the_widest_interval() -> None:
    assert interval([1e300, 0.0, 0.5], 1e300) == (-1e300, 1e300)


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.999])
@pytest.mark.parametrize("degrees", [1, 2, 3, 5, 10, 30, 101, 399, 400, 1000])
def test_students_quantiles_are_those_of_scipy(degrees: int, confidence: float) -> None:
    from scipy.stats import t

    error = 1e-8 if degrees < 400 else 0.006
    if confidence > 0.95 and degrees >= 400:
        error = 0.02
    assert student_t(confidence, degrees) == pytest.approx(t.ppf((1 + confidence) / 2, degrees), rel=error)


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
