"""Claims about the learning rate that steers itself: its rule, tried on scripted policies."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file

from ratchet.settings.project_settings import Settings
from ratchet.status import next_round, next_round_line
from ratchet.store.records import Group
from ratchet.store.states import GroupState
from ratchet.store.store import Store
from ratchet.trainer.errors import SettingError
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
from ratchet.trainer.learner_api import RoundReport
from ratchet.trainer.local_learner import Learner
from ratchet.trainer.observability.progress import Progress
from ratchet.trainer.rounds.backlog import RoundSize
from ratchet.trainer.rounds.round_runner import RoundRunner
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerSettings
from tests.harness.records import judged_group
from tests.harness.trainer.agents import agents_work
from tests.harness.trainer.stepped_controller import SteppedController
from tests.harness.trainer.tiny import build_row, build_rows
from tests.trainer.test_backlog import backlog
from tests.trainer.test_learner import LearnerMaker, train

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


SETTINGS = LearnerSettings(steps_per_round=2, threads=1)


class Collapsing(Learner):
    """A learner whose first rounds make good answers less likely, as its report says; the third does not."""

    def train_round(self, rows: Sequence[TokenRow], *how: Any) -> RoundReport:
        found = super().train_round(rows, *how)
        return replace(found, logprob_change_positive_mean=-0.05 if found.step < 3 else 0.01)


@pytest.fixture
def make_learner(tiny_model: Path) -> LearnerMaker:
    def make(settings: LearnerSettings = SETTINGS, *, resume_from: Path | None = None) -> Learner:
        return Learner(str(tiny_model), settings, resume_from=resume_from)

    return make


@pytest.mark.slow
def test_a_rate_that_steers_itself_is_resumed_bit_for_bit(make_learner: LearnerMaker, tmp_path: Path) -> None:
    steady = make_learner()
    first, second = train(steady, range(2))
    assert second.learning_rate != first.learning_rate == 2e-3
    steady.save(tmp_path / "0001")
    expected = train(steady, range(2, 5))
    resumed = make_learner(resume_from=tmp_path / "0001")
    assert train(resumed, range(2, 5)) == expected
    for learner, name in ((resumed, "0002"), (steady, "0003")):
        learner.save(tmp_path / name)
    ours, theirs = (load_file(tmp_path / name / "learner" / "lora.safetensors") for name in ("0002", "0003"))
    assert all(tensor.equal(theirs[name]) for name, tensor in ours.items())
    steady.load(tmp_path / "0001", SETTINGS)  # a rollback, in place
    assert train(steady, range(2, 5)) == expected
    steady.load(None, SETTINGS)
    assert train(steady, range(2)) == [first, second]
    steady.load(None, replace(SETTINGS, loss_type="sft"))  # a warm start is not steered
    assert [report.learning_rate for report in train(steady, range(2))] == [2e-3, 2e-3]


def test_a_rate_set_by_hand_stays_whatever_the_rounds_move(make_learner: LearnerMaker, tmp_path: Path) -> None:
    steered = make_learner()
    train(steered, range(2))
    steered.save(tmp_path / "0001")
    fixed = make_learner(replace(SETTINGS, learning_rate=3e-5), resume_from=tmp_path / "0001")
    assert [report.learning_rate for report in train(fixed, range(3))] == [3e-5] * 3


@pytest.mark.parametrize("loss", ["dapo", "sft"])
@pytest.mark.parametrize("steps", [1, 2])
def test_the_movement_is_the_one_computed_by_hand(loss: str, steps: int, make_learner: LearnerMaker) -> None:
    learner = make_learner(
        replace(SETTINGS, loss_type=loss, steps_per_round=steps, learning_rate=1e-2, token_budget=64)
    )
    rows = [build_row(number, advantage=1.0 - number % 2 * (loss != "sft") * 2) for number in range(4)]
    before = learner.score(rows)
    report = learner.train_round(rows)
    pairs = zip(rows, before, learner.score(rows), strict=True)
    gaps = [
        (row.advantage, new - old)
        for row, olds, news in pairs
        for old, new, on in zip(olds, news, row.mask, strict=True)
        if on
    ]
    good = [gap for advantage, gap in gaps if advantage > 0]
    assert report.approx_kl_tokens == len(gaps)
    assert report.approx_kl == pytest.approx(sum(math.exp(g) - 1 - g for _, g in gaps) / len(gaps), rel=1e-2)
    assert report.logprob_change_abs_mean == pytest.approx(sum(abs(g) for _, g in gaps) / len(gaps), rel=1e-3)
    assert report.logprob_change_positive_mean == pytest.approx(sum(good) / len(good), rel=1e-3)
    assert report.approx_kl > 1e-5


@pytest.mark.slow
def test_a_round_that_makes_good_answers_less_likely_raises_an_alarm_until_one_does_not(
    store: Store, make_controller: Callable[..., SteppedController], tiny_model: Path, tmp_path: Path
) -> None:
    controller = make_controller(groups_per_round=9)
    runner = RoundRunner(store, "agent", tmp_path / "checkpoints")
    learner = Collapsing(str(tiny_model), replace(SETTINGS, steps_per_round=1))
    for version, names in enumerate((["collapse:agent"], ["collapse:agent"], [])):
        for task in "ab":
            agents_work(store, f"{task}{version}", [0.0, 1.0])
        controller.step(1000.0)
        runner.run_round(learner, store.groups.awaiting_round("agent"), version)
        assert [alarm.name for alarm in store.alarms.active()] == names
    (held, *_) = store.rounds.page("agent")
    assert held.metrics["approx_kl"] > 0
    assert held.metrics["learning_rate"] > 0


class RecordingLearner:
    """A learner that only notes the rounds that it is given."""

    step = 0

    def __init__(self, unfit: Sequence[str] = ()) -> None:
        self.scales: list[float] = []
        self._unfit = unfit

    def unfit(self, row: TokenRow) -> str | None:
        return "another model's" if row.trajectory_id in self._unfit else None

    def report_progress_to(self, progress: Progress) -> None:
        """Nobody watches it."""

    def close(self) -> None:
        """It holds nothing."""

    def train_round(self, rows: Sequence[TokenRow], rate_scale: float = 1.0) -> RoundReport:
        self.scales.append(rate_scale)
        return RoundReport(0.0, 0.0, 0.0, 0.0, 1, len(rows), 1, 1, 0.0, 0.0, 0, 0.0, 0.0, 1.0)

    def score(
        self, rows: Sequence[TokenRow | Sequence[int]], *, adapter: bool | str | Path = True
    ) -> list[tuple[float, ...]]:
        raise NotImplementedError

    def save(self, folder: str | Path) -> None:
        Path(folder).mkdir(parents=True)

    def load(self, folder: str | Path | None, settings: LearnerSettings) -> None:
        raise NotImplementedError


def group(members: int) -> Group:
    names = tuple(map(str, range(members)))
    return Group(
        id="g", key="k", alias="a", state=GroupState.JUDGED, formed_at=0.0, members=names, initial_size=members
    )


def test_many_small_rounds_add_as_much_noise_as_one_whole_round_of_the_same_samples() -> None:
    size = RoundSize(groups_per_round=16, num_generations=8)
    assert size.rate_scale([group(8)] * 16) == size.rate_scale([group(8)] * 40) == 1.0
    for count in (1, 2, 4, 8):
        rounds = 16 // count
        assert rounds * size.rate_scale([group(8)] * count) ** 2 == pytest.approx(1.0)
    assert size.rate_scale([group(1)]) == pytest.approx(math.sqrt(1 / 128))


def test_a_round_begins_whole_or_late_and_never_below_its_least(store: Store) -> None:
    waiting = backlog(store, round_wait_seconds=600.0, min_groups_per_round=2)
    assert [waiting.is_round_due(*case) for case in ((16.0, 0.0), (15.5, 599.0), (2.0, 600.0), (1.875, 1e9))] == [
        True, False, True, False,
    ]  # fmt: skip


def test_a_round_takes_the_step_that_its_trained_groups_are_worth(store: Store, tmp_path: Path) -> None:
    groups = [judged_group(store, [f"{task}1", f"{task}2"], [0.0, 1.0], task=task) for task in "abcd"]
    for one in groups:  # the judge has seen their calls
        verdicts = store.groups.verdicts(one.members).values()
        store.groups.replace_verdicts([msgspec.structs.replace(verdict, judged_at=10.0) for verdict in verdicts])
    learner = RecordingLearner(unfit=["d1", "d2"])
    runner = RoundRunner(store, "agent", tmp_path, size=RoundSize(groups_per_round=12, num_generations=2))
    candidate = runner.run_round(learner, groups, 0)
    assert candidate is not None
    assert learner.scales == [0.5]  # of three groups of twelve: the fourth held nothing to train
    assert store.rounds.get(candidate.round_id or "").metrics["rate_scale"] == 0.5


def test_a_scaled_round_moves_the_weights_less_and_leaves_the_rate_alone(tiny_model: Path) -> None:
    settings = LearnerSettings(learning_rate=1e-3, threads=1)
    whole, small = (Learner(str(tiny_model), settings) for name in "ab")
    rows = build_rows(6)
    moved = whole.train_round(rows).weight_change
    assert small.train_round(rows, 0.25).weight_change == pytest.approx(0.25 * moved, rel=1e-3)
    again = build_rows(6, seed=2)
    ratio = small.train_round(again).weight_change / whole.train_round(again).weight_change
    assert ratio == pytest.approx(1.0, rel=0.2)


def test_one_vote_does_not_move_the_policy_as_a_whole_round_does(tiny_model: Path) -> None:
    size = RoundSize(groups_per_round=2, num_generations=8)
    settings = LearnerSettings(learning_rate=1e-3, threads=1)
    one, many = (Learner(str(tiny_model), settings) for name in "ab")
    vote = one.train_round([build_row(1, advantage=1.0)], size.rate_scale([group(1)])).weight_change
    whole = many.train_round([replace(row, advantage=1.0) for row in build_rows(16)], size.rate_scale([group(8)] * 2))
    assert vote < 0.3 * whole.weight_change


def test_status_says_what_the_next_round_waits_for(store: Store) -> None:
    judged_group(store, ["a", "b"], [0.0, 1.0])
    settings = Settings.of(
        {"model": "agent", "trainer": {"judge": "a:b", "groups_per_round": 12, "min_groups_per_round": 3}}
    )
    waits = next_round(store, settings)
    assert waits is not None
    assert next_round_line(waits) == "1 of 12 groups judged; it starts with fewer after 600 s, but with 3 at least"
