"""The gate in the controller: worse versions go back, better ones become live, doubtful ones wait; all is on record."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from ratchet.store.states import PolicyAction, PolicyState
from ratchet.store.store import Store
from ratchet.trainer.controller_loop import Controller
from tests.harness.trainer import judge_samples
from tests.harness.trainer.agents import agents_work

GATE = {"canary": True, "canary_share": 0.25, "min_samples": 10, "max_samples": 60, "margin": 0.1}


def first_canary(store: Store, controller: Controller) -> float:
    """Bring the controller to its first canary; return the time after that."""
    agents_work(store, "a", [0.0, 1.0])
    agents_work(store, "b", [1.0, 0.0])
    now = time.time()
    controller.step(now)
    assert [(p.version, p.state) for p in store.policies.serving()] == [(0, "live"), (1, "canary")]
    return now + 1.0


def traffic(store: Store, controller: Controller, now: float, *, canary: float, live: float, most: int = 40) -> int:
    """Serve both versions, by share, with these success rates until something is decided; return how many batches."""
    dice = random.Random(7)
    for batch in range(most):
        for version, rate, count in ((1, canary, 2), (0, live, 6)):
            scores = [float(dice.random() < rate) for _ in range(count)]
            agents_work(store, f"{now:.0f}-{batch}-v{version}", scores, version=version, at=time.time())
        controller.step(now + batch + 100.0)
        controller.step(now + batch + 101.5)
        if store.policies.get("agent", 1).state is not PolicyState.CANARY:
            return batch
    return most


@pytest.mark.slow
def test_a_worse_version_is_rolled_back_and_what_it_sampled_is_not_trained(
    store: Store, make_controller: Callable[..., Controller]
) -> None:
    controller = make_controller(release=GATE, groups_per_round=2)
    learner = controller.learner
    now = first_canary(store, controller)
    assert traffic(store, controller, now, canary=0.1, live=0.9) < 40
    assert [p.version for p in store.policies.serving()] == [0]
    newest = store.decisions.decisions_of("agent", 1)[0]
    assert (newest.action, newest.decided_by) == (PolicyAction.ROLLBACK, "release")
    assert newest.evidence["release"]["difference"]["high"] < 0
    assert store.trajectories.drop_counts()["rolled_back"] > 0
    agents_work(store, "mixed", [0.0, 1.0], at=time.time())
    agents_work(store, "other", [1.0, 0.0], at=time.time())
    controller.step(now + 300.0)
    controller.step(now + 302.0)
    assert controller.learner is learner  # in place: it began again from the base
    assert store.rounds.page("agent")[0].from_version == 0
    trained = [run for run in store.trajectories.page(1000) if run.round_id and run.id[0] not in "ab"]
    assert trained
    assert {run.version for run in trained} == {0}


@pytest.mark.slow
def test_a_better_version_is_promoted_and_nothing_is_trained_meanwhile(
    store: Store, make_controller: Callable[..., Controller]
) -> None:
    controller = make_controller(release=GATE | {"max_gain": None})
    now = first_canary(store, controller)
    batches = traffic(store, controller, now, canary=0.95, live=0.3)
    assert batches < 40
    assert store.policies.live()["agent"].version == 1
    newest = store.decisions.decisions_of("agent", 1)[0]
    assert (newest.action, newest.decided_by) == (PolicyAction.PROMOTE, "release")
    assert newest.evidence["release"]["difference"]["low"] > -0.1
    first, *_ = reversed(store.rounds.page("agent"))
    later_starts = [held.started_at for held in store.rounds.page("agent") if held.id != first.id]
    assert all(started >= newest.decided_at for started in later_starts)


@pytest.mark.slow
def test_a_jump_waits_for_a_person_with_an_alarm_and_an_order_by_hand_ends_it(
    store: Store, make_controller: Callable[..., Controller]
) -> None:
    controller = make_controller(release=GATE | {"max_gain": 0.4})
    now = first_canary(store, controller)
    assert traffic(store, controller, now, canary=1.0, live=0.2, most=30) == 30
    assert store.decisions.decisions_of("agent", 1)[0].action is PolicyAction.HOLD
    assert len(store.decisions.decisions_of("agent", 1)) == 2  # the canary and one hold, however often it was looked at
    (alarm,) = [alarm for alarm in store.alarms.active() if alarm.name == "approval_required:agent"]
    assert "exceeds max_gain" in alarm.reason
    assert len(store.rounds.page("agent")) == 1
    store.policies.promote("agent", 1, {}, by="anna", reason="read fifty answers")
    controller.step(now + 300.0)
    assert "approval_required:agent" not in {alarm.name for alarm in store.alarms.active()}
    assert len(store.rounds.page("agent")) == 2


@pytest.mark.slow
def test_a_held_version_that_turns_out_worse_goes_back_by_itself(
    store: Store, make_controller: Callable[..., Controller]
) -> None:
    controller = make_controller(release=GATE)
    now = first_canary(store, controller)
    store.policies.require_approval("agent", 1, {}, by="anna", reason="I want to look")
    assert traffic(store, controller, now, canary=0.0, live=1.0) < 40
    assert store.policies.get("agent", 1).state is PolicyState.REJECTED


@pytest.mark.slow
def test_a_second_judge_that_does_not_see_the_gain_holds_it(
    store: Store, make_controller: Callable[..., Controller]
) -> None:
    second = {"kind": "function", "function": "tests.harness.trainer.judge_samples:unmoved"}
    controller = make_controller(release=GATE | {"max_gain": None, "second_judge": second})
    now = first_canary(store, controller)
    assert traffic(store, controller, now, canary=1.0, live=0.2, most=30) == 30
    held = store.decisions.decisions_of("agent", 1)[0]
    assert held.action is PolicyAction.HOLD
    assert "does not see the gain" in held.reason
    assert held.evidence["second_judge"]["pairs"] >= 10


@pytest.mark.slow
def test_a_second_judge_that_sees_it_too_lets_it_pass(store: Store, make_controller: Callable[..., Controller]) -> None:
    second = {"kind": "function", "function": "tests.harness.trainer.judge_samples:scripted"}
    controller = make_controller(release=GATE | {"max_gain": None, "second_judge": second})
    now = first_canary(store, controller)
    assert traffic(store, controller, now, canary=1.0, live=0.2) < 40
    assert store.policies.live()["agent"].version == 1
    assert store.decisions.decisions_of("agent", 1)[0].evidence["second_judge"]["low"] > 0


def test_a_canary_without_traffic_goes_back_when_its_deadline_is_over(
    store: Store, make_controller: Callable[..., Controller]
) -> None:
    controller = make_controller(release=GATE | {"deadline_seconds": 50.0})
    now = first_canary(store, controller)
    controller.step(now + 10.0)
    assert store.policies.get("agent", 1).state is PolicyState.CANARY
    controller.step(now + 60.0)
    assert store.policies.get("agent", 1).state is PolicyState.REJECTED
    assert "its deadline is over" in store.decisions.decisions_of("agent", 1)[0].reason


@pytest.mark.slow
def test_a_restarted_trainer_goes_on_with_the_canary(store: Store, make_controller: Callable[..., Controller]) -> None:
    now = first_canary(store, make_controller(release=GATE))
    controller = make_controller(release=GATE)
    assert traffic(store, controller, now, canary=0.0, live=1.0) < 40
    assert store.policies.live()["agent"].version == 0


@pytest.mark.slow
def test_a_roll_back_by_hand_while_a_judge_thinks_stops_nothing(
    store: Store, make_controller: Callable[..., Controller]
) -> None:
    controller = make_controller(release=GATE)
    now = first_canary(store, controller)
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
