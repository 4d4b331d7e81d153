"""Claims about the learning rate that steers itself: its rule, tried on scripted policies."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from ratchet.trainer.errors import SettingError
from ratchet.trainer.learner.host import Learner
from ratchet.trainer.learner.learning_rate import (
    Bounds,
    LearningRateController,
    RateState,
    RoundShift,
    bounds,
    next_state,
    schedule,
    target,
    target_shift,
)
from ratchet.trainer.settings.learner_settings import LearnerSettings
from tests.harness.trainer.tiny import build_rows

TINY = Bounds(1e-6, 2e-3, 1e-2)
TARGET = 0.005
FP32 = 1e-9  # nats per token: the floor of k3 in fp32


def rates(
    start: float,
    rounds: int,
    moves: Callable[[int, float], tuple[float, float]],
    *,
    limits: Bounds = TINY,
    floor: float = FP32,
    target: float = TARGET,
) -> list[float]:
    """The rates of so many rounds; `moves` says k3 as it is read and entropy of a round at a rate."""
    state, used = RateState(start), []
    for number in range(rounds):
        used.append(state.rate)
        k3, entropy = moves(number, state.rate)
        state = next_state(state, RoundShift(k3, floor, entropy, target), limits)
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
    found = [target_shift(state, RoundShift(0.0, FP32, entropy, TARGET)) for entropy in (0.4, 0.2, 0.1, 0.02)]
    assert found == pytest.approx([TARGET, TARGET, TARGET / 2, TARGET / 10])
    first = target_shift(RateState(1e-3), RoundShift(0.0, FP32, 0.02, TARGET))
    assert first == TARGET  # the first round sets the scale


# k3's floor: the tiny policy in bf16, a model of 135 million parameters, and a mixture of experts whose logprobs have
# an error of 0.12 nats.
FLOORS = (5e-5, 2e-3, 0.0144)
_GROWTH = 40  # rounds after which the adapter has grown so much that bf16 shows all of a step


def read_in_bf16(
    per_rate: float, floor: float, tokens: int, entropy: Callable[[int], float] = lambda _: 0.5
) -> Callable[[int, float], tuple[float, float]]:
    """A model in bf16 whose true movement is (per_rate * rate) squared.

    Of a small step a part is lost: the slopes of 0.08, 0.26, 0.46 and 0.85 that were measured at movements of 0.014,
    0.066, 0.184 and 0.573 nats (rms). The reading adds the floor, and scatters as the mean of so many tokens with a
    heavy tail.
    """
    dice = random.Random(int(1e6 * floor) + tokens)

    def moves(number: int, rate: float) -> tuple[float, float]:
        true = per_rate * rate  # sqrt(k3); rms is sqrt(2) times that
        share = min(1.0, (2**0.5 * true / 0.7) ** 0.6 + number / _GROWTH)
        read = floor + (share * true) ** 2
        return read * max(0.0, dice.gauss(1.0, (10 / tokens) ** 0.5)), entropy(number)

    return moves


@pytest.mark.parametrize("floor", FLOORS)
@pytest.mark.parametrize(("tokens", "target"), [(256, 0.01), (4096, 0.001)])
@pytest.mark.parametrize("per_rate", [30.0, 300.0, 1000.0])  # 1e-4 moves 9e-6, 9e-4 and 0.01 nats a token
def test_the_floor_of_bf16_never_steers_the_rate(floor: float, tokens: int, target: float, per_rate: float) -> None:
    """The rate is neither driven to its minimum by rounding, nor does a step exceed what rounding can hide."""
    limits = bounds(8_000_000_000)
    used = rates(limits.start, 60, read_in_bf16(per_rate, floor, tokens), limits=limits, floor=floor, target=target)
    moved = [(per_rate * rate) ** 2 for rate in used[5:]]
    hidden = max(target, floor)  # nats per token: the smallest movement that the reading can bring down
    assert all(one <= 6 * hidden for one in moved)
    assert all(one >= target / 8 or rate >= limits.start for one, rate in zip(moved, used[5:], strict=True))


def test_a_floor_that_is_not_measured_drives_the_rate_to_its_minimum() -> None:
    limits = bounds(8_000_000_000)
    moves = read_in_bf16(300.0, 0.0144, 4096)
    assert rates(limits.start, 20, moves, limits=limits, floor=0.0, target=0.001)[-1] == limits.least


@pytest.mark.parametrize("floor", FLOORS)
def test_a_step_far_too_large_is_brought_down_whatever_the_floor(floor: float) -> None:
    limits = bounds(8_000_000_000)
    per_rate = 5000.0  # 1e-4 moves 0.25 nats a token
    used = rates(limits.start, 10, read_in_bf16(per_rate, floor, 4096), limits=limits, floor=floor, target=0.001)
    assert all((per_rate * rate) ** 2 < 0.05 for rate in used[3:])


def test_falling_entropy_in_bf16_does_not_wear_the_rate_down() -> None:
    limits = bounds(500_000_000)
    moves = read_in_bf16(300.0, 2e-3, 4096, entropy=lambda number: 0.5 * max(0.02, 1 - number / 20))
    assert min(rates(limits.start, 60, moves, limits=limits, floor=2e-3, target=0.001)) > limits.start / 3


def test_a_step_that_is_scaled_for_a_small_round_is_judged_by_its_own_scale() -> None:
    def update(scale: float, floor: float) -> float:
        moved = RoundShift((24.0 * 2e-3 * scale) ** 2 + floor, floor, 0.13, TARGET, scale)
        return next_state(RateState(2e-3), moved, TINY).rate

    assert update(0.25, FP32) == update(1.0, FP32)
    assert update(0.05, 1e-4) == 2e-3  # rounding hides a step that small: it says nothing
    small = RoundShift((24.0 * 1e-4 * 0.5) ** 2, FP32, 0.13, TARGET, 0.5)
    assert next_state(RateState(1e-4), small, TINY).rate == pytest.approx(4e-4)


@pytest.mark.parametrize("k3", [0.0, float("nan"), float("inf")])
def test_a_movement_that_is_nothing_or_no_number_leaves_a_rate_within_its_bounds(k3: float) -> None:
    used = rates(2e-3, 20, lambda number, rate: (k3, 0.0), floor=0.0)
    assert used[-1] == (TINY.most if k3 == 0.0 else TINY.least)


def test_bounds_fall_from_tiny_models_to_those_of_twenty_million_parameters() -> None:
    sizes = [10_000, 1_000_000, 10_000_000, 20_000_000, 135_000_000, 70_000_000_000]
    most = [bounds(size).most for size in sizes]
    assert most == pytest.approx([1e-2, 1e-2, 1e-3, 5e-4, 5e-4, 5e-4])
    assert [bounds(size).start for size in sizes] == pytest.approx([one / 5 for one in most])
    assert {bounds(size).least for size in sizes} == {1e-6}


def test_the_default_target_is_that_of_a_trajectory_within_bounds_of_a_token() -> None:
    def per_token(tokens: Sequence[int]) -> list[float]:
        return [target(None, 8 * one, 8) for one in tokens]

    assert per_token([10, 45, 100, 1000]) == pytest.approx([0.01, 0.3 / 45, 0.003, 0.001])
    assert target(0.02, 100, 1) == 0.02


def test_a_fixed_rate_and_an_imitation_are_not_steered() -> None:
    moved = RoundShift(1e-9, 0.0, 0.1, TARGET)
    for settings, expected in ((LearnerSettings(learning_rate=3e-4), 3e-4), (LearnerSettings(loss_type="sft"), 2e-3)):
        rate_controller = LearningRateController(settings, 400_000, "fp32")
        rate_controller.update(moved)
        rate_controller.restore({"rate": 5e-3, "first_entropy": 0.1})
        assert (rate_controller.rate, rate_controller.state()) == (expected, None)


def test_what_a_checkpoint_keeps_is_what_goes_on() -> None:
    one, other = (LearningRateController(LearnerSettings(), 400_000, "fp32") for _ in range(2))
    one.update(RoundShift(1.23e-4, FP32, 0.123, TARGET))
    other.restore(one.state())
    for rate_controller in (one, other):
        rate_controller.update(RoundShift(0.7, FP32, 0.09, TARGET))
    assert one.state() == other.state()
    other.restore(None)
    assert other.rate == 2e-3


def test_a_schedule_rises_over_the_warm_up_and_falls_to_a_tenth() -> None:
    constant = LearnerSettings(learning_rate=1e-3, warmup_steps=3)
    assert [schedule(constant, step) for step in (0, 1, 2, 3, 1000)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    linear = LearnerSettings(learning_rate=1e-3, lr_scheduler_type="linear", warmup_steps=2, max_steps=12)
    assert [schedule(linear, step) for step in (2, 7, 12, 99)] == pytest.approx([1.0, 0.55, 0.1, 0.1])
    cosine = LearnerSettings(learning_rate=1e-3, lr_scheduler_type="cosine", max_steps=10)
    assert [schedule(cosine, step) for step in (0, 5, 10, 99)] == pytest.approx([1.0, 0.55, 0.1, 0.1])
    assert schedule(LearnerSettings(), 5) == 1.0


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"lr_scheduler_type": "cosine", "max_steps": 100}, "must be constant, unless learning_rate is a number"),
        ({"warmup_steps": 5}, "must be 0, unless learning_rate is a number: auto sets the rate after each round"),
        (
            {"learning_rate": 1e-4, "lr_scheduler_type": "linear"},
            "max_steps is None; it must be at least 1 with",
        ),
        (
            {"learning_rate": 1e-4, "lr_scheduler_type": "linear", "max_steps": 5, "warmup_steps": 5},
            "max_steps is 5; it must be at least 6 with lr_scheduler_type linear and warmup_steps 5",
        ),
        ({"learning_rate": 1e-4, "max_steps": 100}, "must be null with lr_scheduler_type constant, which never falls"),
        ({"lr_scheduler_type": "step"}, "must be one of constant, linear, cosine"),
        ({"weight_decay": 1.0}, "weight_decay is 1.0; it must be 0 or more and below 1"),
        ({"learning_rate": 1e-4, "warmup_steps": -1}, "warmup_steps is -1; it must be 0 or more"),
    ],
)
def test_schedules_that_have_no_effect_or_no_end_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingError, match=re.escape(says)):
        LearnerSettings(**fields)


def test_a_learner_follows_its_schedule_over_a_restart_and_decays_its_weights(tiny_model: Path, tmp_path: Path) -> None:
    settings = LearnerSettings(learning_rate=1e-3, lr_scheduler_type="linear", warmup_steps=1, max_steps=3)
    learner = Learner(str(tiny_model), settings)
    used = [learner.train_round(build_rows(4)).learning_rate for _ in range(2)]
    learner.save(tmp_path / "saved")
    again = Learner(str(tiny_model), settings, resume_from=tmp_path / "saved")
    used += [again.train_round(build_rows(4)).learning_rate for _ in range(2)]
    assert used == pytest.approx([5e-4, 1e-3, 5.5e-4, 1e-4])

    def norm(weight_decay: float) -> float:
        fields = replace(settings, learning_rate=0.1, weight_decay=weight_decay)
        decayed = Learner(str(tiny_model), fields)
        decayed.train_round(build_rows(4))
        decayed.save(tmp_path / f"saved-{weight_decay}")
        weights = load_file(tmp_path / f"saved-{weight_decay}" / "adapter_model.safetensors")
        return float(sum(weight.float().square().sum() for name, weight in weights.items() if "lora_A" in name))

    assert norm(0.9) < norm(0.0)
