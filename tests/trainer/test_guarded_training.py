"""Training under the guarded policy: it goes on during a ramp, and a rollback takes back what was built on it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from ratchet.store.policies.serving import shares_in_force
from ratchet.store.records import VersionDraw
from ratchet.store.states import PolicyAction, PolicyState
from ratchet.store.store import Store
from tests.harness.trainer import judge_samples
from tests.harness.trainer.agents import agents_work
from tests.harness.trainer.stepped_controller import SteppedController, until

GUARDED: dict[str, Any] = {"policy": "guarded", "invariant_prompts": 0, "ramp": 16, "max_gain": None}
MakeController = Callable[..., SteppedController]


def first_ramp(store: Store, controller: SteppedController) -> float:
    """Bring the controller to its first ramp; return the time after that."""
    agents_work(store, "a", [0.0, 1.0])
    agents_work(store, "b", [1.0, 0.0])
    now = time.time()
    controller.step(now)
    assert [(one.version, one.state) for one in store.policies.serving()] == [(0, "live"), (1, "ramp")]
    return now + 60.0


def traffic(
    store: Store,
    controller: SteppedController,
    now: float,
    rates: Mapping[int, float],
    *,
    most: int = 40,
    age: float = 400.0,
) -> int:
    """Serve by the shares in force, with these success rates, until the ramp of version 1 is over; return batches.

    `age`: seconds since the trajectories began. With 0 they begin after the ramp, but by the judge's clock, which is
    the real one, they end after their verdict, so they are not trained.
    """
    dice = random.Random(7)
    for batch in range(most):
        shares = shares_in_force(store.policies.serving())
        draw = VersionDraw(shares=shares)
        for number, version in enumerate(dice.choices(list(shares), list(shares.values()), k=8)):
            scores = [float(dice.random() < rates.get(version, 0.5)) for _ in range(2)]
            name = f"{now:.0f}-{batch}-{number}"
            agents_work(store, name, scores, version=version, at=now - age, draw=draw)
        now += 400.0 - age  # they are idle by then
        for _ in range(4):
            now += 5.0
            controller.step(now)
        if store.policies.get("agent", 1).state is not PolicyState.RAMP:
            return batch
    return most


def ramps(store: Store) -> list[int]:
    """Return the versions that began a ramp, the oldest first."""
    decisions = reversed(store.decisions.decisions_of("agent"))
    return [one.version for one in decisions if one.action is PolicyAction.RAMP]


@pytest.mark.slow
def test_training_goes_on_during_a_ramp_and_a_rollback_rejects_what_it_made(
    store: Store, make_controller: MakeController
) -> None:
    controller = make_controller(release=GUARDED | {"ramp": 512})
    learner = controller.learner
    now = first_ramp(store, controller)
    agents_work(store, "c", [0.0, 1.0], at=now - 400.0, version=1)
    agents_work(store, "d", [1.0, 0.0], at=now - 400.0, version=0)
    controller.step(now + 100.0)
    controller.step(now + 101.0)
    assert store.rounds.page("agent")[0].from_version == 1
    assert store.policies.get("agent", 2).state is PolicyState.CANDIDATE, "it waits for the end of the ramp"
    store.policies.roll_back_manually("agent", None, by="anna", reason="rude")
    assert {policy.version: str(policy.state) for policy in store.policies.all("agent")}[2] == "rejected"
    for name in "gh":
        agents_work(store, name, [0.0, 1.0], at=now - 300.0)
    for later in range(4):
        controller.step(now + 200.0 + later)
    assert store.rounds.page("agent")[0].from_version == 0
    assert controller.learner is learner


@pytest.mark.slow
def test_training_stops_by_itself_when_it_is_too_far_ahead_of_what_serves(
    store: Store, make_controller: MakeController
) -> None:
    controller = make_controller(release=GUARDED | {"ramp": 512}, groups_per_round=1, max_staleness=2)
    now = time.time()
    for number in range(8):
        agents_work(store, f"t{number}", [float(number % 2), float(1 - number % 2)], at=now - 400.0)
        for _ in range(3):
            now += 50.0
            controller.step(now)
    states = {policy.version: str(policy.state) for policy in store.policies.all("agent")}
    assert states == {0: "live", 1: "ramp", 2: "candidate"}
    assert len(store.groups.awaiting_round("agent")) == 6, "they wait, and are not dropped"


@pytest.mark.slow
def test_after_a_ramp_the_newest_version_is_next_and_the_ones_between_are_skipped(
    store: Store, make_controller: MakeController
) -> None:
    controller = make_controller(release=GUARDED | {"ramp": 48})
    now = first_ramp(store, controller)
    batches = traffic(store, controller, now, {0: 0.5, 1: 0.5})
    assert 2 <= batches < 40
    now += 20.0 * (batches + 1)
    until(controller, now, lambda: len(ramps(store)) == 2)
    states = {policy.version: policy.state for policy in store.policies.all("agent")}
    newest = ramps(store)[-1]
    assert newest > 2
    assert [states[version] for version in (0, 1, newest)] == ["holdback", "live", "ramp"]
    assert {states[version] for version in range(2, newest)} == {"retired"}
    skipped = [one.version for one in store.decisions.decisions_of("agent") if one.action is PolicyAction.SKIP]
    assert sorted(skipped) == list(range(2, newest))


@pytest.mark.slow
def test_a_second_judge_that_does_not_see_the_gain_holds_the_ramp(
    store: Store, make_controller: MakeController
) -> None:
    second = {"kind": "function", "function": "tests.harness.trainer.judge_samples:unmoved"}
    controller = make_controller(release=GUARDED | {"ramp": 64, "second_judge": second})
    now = first_ramp(store, controller)
    assert traffic(store, controller, now, {0: 0.0, 1: 1.0}, most=6, age=0.0) == 6, "the ramp did not end"
    held = store.decisions.decisions_of("agent", 1)[0]
    assert held.action is PolicyAction.HOLD
    assert "it does not see the gain of +" in held.reason
    assert held.evidence["second_judge"]["prompts"] >= 16


@pytest.mark.slow
def test_a_roll_back_by_hand_while_a_judge_thinks_stops_nothing(store: Store, make_controller: MakeController) -> None:
    controller = make_controller(release=GUARDED)
    now = first_ramp(store, controller)
    agents_work(store, "late", [0.0, 1.0], version=1, at=now)
    judge_samples.pause.clear()
    try:
        controller.step(now + 100.0)
        store.policies.roll_back("agent", 0, {}, by="anna", reason="rude")
        controller.step(now + 102.0)
    finally:
        judge_samples.pause.set()
    for later in range(4):
        controller.step(now + 103.0 + later)
    assert store.trajectories.drop_counts() == {"rolled_back": 2}
