"""Claims about the learning rate that steers itself: its rule, tried on scripted policies."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from ratchet.trainer.learner.learning_rate import (
    ROUNDING,
    Bounds,
    LearningRateController,
    RateState,
    RoundShift,
    bounds,
    next_state,
    target,
    target_shift,
)
from ratchet.trainer.settings.learner_settings import LearnerSettings

TINY = Bounds(1e-6, 2e-3, 1e-2)
TARGET = 0.005
FP32, BF16 = ROUNDING["fp32"], ROUNDING["bf16"]


def rates(
    start: float,
    rounds: int,
    moves: Callable[[int, float], tuple[float, float]],
    *,
    limits: Bounds = TINY,
    rounding: float = FP32,
) -> list[float]:
    """The rates of so many rounds; `moves` says k3 and entropy of a round at a rate."""
    state, used = RateState(start), []
    for number in range(rounds):
        used.append(state.rate)
        k3, entropy = moves(number, state.rate)
        state = next_state(state, RoundShift(k3, entropy, TARGET), limits, rounding)
    return used


def quadratic(per_rate: float, entropy: float = 0.13) -> Callable[[int, float], tuple[float, float]]:
    """A policy that moves by (per_rate * rate) squared, whatever happens."""
    return lambda number, rate: ((per_rate * rate) ** 2, entropy)


@pytest.mark.parametrize("start", [1e-6, 1e-5, 2e-3, 1e-2])
@pytest.mark.parametrize("per_rate", [12.0, 24.0, 36.0])  # what the e-mail policy showed
def test_the_rate_finds_the_movement_that_is_wanted_from_any_start(start: float, per_rate: float) -> None:
    used = rates(start, 12, quadratic(per_rate))
    for rate in used[7:]:
        assert TARGET / 2 <= (per_rate * rate) ** 2 <= 2 * TARGET or rate == TINY.most


def test_it_rises_by_four_at_most_and_falls_in_one_round() -> None:
    up, down = rates(1e-6, 6, quadratic(24.0)), rates(1e-2, 6, quadratic(2400.0))
    assert [later / earlier for earlier, later in pairwise(up)] == pytest.approx([4.0] * 5)
    assert down[1] == pytest.approx(TARGET**0.5 / 2400.0)


def test_noise_of_a_factor_of_two_in_a_movement_that_is_right_does_not_move_the_rate() -> None:
    dice, right = random.Random(5), TARGET**0.5 / 24.0
    used = rates(right, 50, lambda number, rate: ((24.0 * rate) ** 2 * dice.uniform(0.51, 1.99), 0.13))
    assert set(used) == {right}


def test_a_heavy_tail_leaves_the_rate_within_a_factor_of_three() -> None:
    dice, right = random.Random(7), TARGET**0.5 / 24.0
    used = rates(right, 500, lambda number, rate: ((24.0 * rate) ** 2 * dice.lognormvariate(0.0, 0.7), 0.13))
    assert all(right / 3 < rate < right * 3 for rate in used)


def test_a_low_entropy_policy_does_not_drive_the_rate_into_its_bound() -> None:
    def saturating(number: int, rate: float) -> tuple[float, float]:
        share = max(0.1, 1 - number / 12)  # of the entropy, as on the e-mail example
        return (24.0 * rate) ** 2 * share, 0.13 * share

    used = rates(2e-3, 40, saturating)
    assert max(used) < 5e-3
    constant = rates(2e-3, 40, lambda number, rate: (saturating(number, rate)[0], 0.13))
    assert constant[-1] > 6e-3  # what a constant target does


def test_the_aim_falls_with_the_entropy_and_never_rises_above_the_target() -> None:
    state = RateState(1e-3, first_entropy=0.2)
    found = [target_shift(state, RoundShift(0.0, entropy, TARGET), FP32) for entropy in (0.4, 0.2, 0.1, 0.02)]
    assert found == pytest.approx([TARGET, TARGET, TARGET / 2, TARGET / 10])
    assert (
        target_shift(RateState(1e-3), RoundShift(0.0, 0.02, TARGET), FP32) == TARGET
    )  # the first round sets the scale


def test_rounding_in_bf16_does_not_wear_the_rate_down() -> None:
    limits = bounds(500_000_000)

    def rounded(number: int, rate: float) -> tuple[float, float]:
        share = max(0.02, 1 - number / 20)
        return (700.0 * rate) ** 2 * share + BF16, 0.5 * share

    used = rates(limits.start, 60, rounded, limits=limits, rounding=BF16)
    assert min(used) > 1e-5


def test_a_step_that_is_scaled_for_a_small_round_is_judged_by_its_own_scale() -> None:
    def update(scale: float, rounding: float) -> float:
        moved = RoundShift((24.0 * 2e-3 * scale) ** 2, 0.13, TARGET, scale)
        return next_state(RateState(2e-3), moved, TINY, rounding).rate

    assert update(0.25, FP32) == update(1.0, FP32)
    assert update(0.05, BF16) == 2e-3  # too small to be seen in bf16: it says nothing
    small = RoundShift((24.0 * 1e-4 * 0.5) ** 2, 0.13, TARGET, 0.5)
    assert next_state(RateState(1e-4), small, TINY, FP32).rate == pytest.approx(4e-4)


@pytest.mark.parametrize("k3", [0.0, float("nan"), float("inf")])
def test_a_movement_that_is_nothing_or_no_number_leaves_a_rate_within_its_bounds(k3: float) -> None:
    used = rates(2e-3, 20, lambda number, rate: (k3, 0.0))
    assert used[-1] == (TINY.most if k3 == 0.0 else TINY.least)


def test_bounds_fall_from_tiny_models_to_those_of_a_hundred_million_parameters() -> None:
    sizes = [10_000, 1_000_000, 10_000_000, 100_000_000, 70_000_000_000]
    most = [bounds(size).most for size in sizes]
    assert most == pytest.approx([1e-2, 1e-2, 1e-3, 1e-4, 1e-4])
    assert [bounds(size).start for size in sizes] == pytest.approx([one / 5 for one in most])
    assert {bounds(size).least for size in sizes} == {1e-6}


def test_the_default_target_is_that_of_a_trajectory_within_bounds_of_a_token() -> None:
    def per_token(tokens: Sequence[int]) -> list[float]:
        return [target(None, 8 * one, 8) for one in tokens]

    assert per_token([10, 45, 100, 1000]) == pytest.approx([0.01, 0.3 / 45, 0.003, 0.001])
    assert target(0.02, 100, 1) == 0.02


def test_a_fixed_rate_and_an_imitation_are_not_steered() -> None:
    moved = RoundShift(1e-9, 0.1, TARGET)
    for settings, expected in ((LearnerSettings(learning_rate=3e-4), 3e-4), (LearnerSettings(loss_type="sft"), 2e-3)):
        rate_controller = LearningRateController(settings, 400_000, "fp32")
        rate_controller.update(moved)
        rate_controller.restore({"rate": 5e-3, "first_entropy": 0.1})
        assert (rate_controller.rate, rate_controller.state()) == (expected, None)


def test_what_a_checkpoint_keeps_is_what_goes_on() -> None:
    one, other = (LearningRateController(LearnerSettings(), 400_000, "fp32") for _ in range(2))
    one.update(RoundShift(1.23e-4, 0.123, TARGET))
    other.restore(one.state())
    for rate_controller in (one, other):
        rate_controller.update(RoundShift(0.7, 0.09, TARGET))
    assert one.state() == other.state()
    other.restore(None)
    assert other.rate == 2e-3
