"""While the second judge and the first one disagree nothing becomes live by itself: a person decides."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from click.testing import CliRunner

from ratchet.cli import cli
from ratchet.store.records import VersionDraw
from ratchet.store.reports.version_reports import read_awaiting_approval
from ratchet.store.states import PolicyAction, PolicyState
from ratchet.store.store import Store
from tests.harness.trainer.agents import agents_work
from tests.harness.trainer.stepped_controller import SteppedController, until

CONTRARY = {"kind": "function", "function": "tests.harness.trainer.judge_samples:contrary"}
AGREEING = {"kind": "function", "function": "tests.harness.trainer.judge_samples:scripted"}
SENTINEL = {"second_judge": CONTRARY, "second_judge_sample_rate": 1.0, "interval_seconds": 0.5}
GUARDED = {"policy": "guarded", "invariant_prompts": 0, "ramp": 16, "max_gain": None}


def disagreeing(store: Store, controller: SteppedController, now: float, groups: int = 24) -> float:
    """Have so many groups judged by both, a few at a time; return the time after that."""
    for number in range(groups):
        agents_work(store, f"said-{now:.0f}-{number}", [0.0, 1.0], at=time.time())
        if number % 4 == 3:
            now += 100.0  # they are still by then
            controller.step(now)
            time.sleep(0.05)  # the second judge has a thread of its own
    return until(controller, now + 1.0, lambda: "second_judge:agent" in active_alarms(store), most=200)


def active_alarms(store: Store) -> dict[str, str]:
    return {alarm.name: alarm.reason for alarm in store.alarms.active()}


@pytest.mark.slow
def test_under_the_immediate_policy_a_proven_version_waits_for_a_person_while_the_judges_disagree(
    store: Store, make_controller: Callable[..., SteppedController]
) -> None:
    controller = make_controller(sentinel=SENTINEL, groups_per_round=24)
    now = disagreeing(store, controller, time.time())
    now = until(controller, now, lambda: store.policies.awaiting_approval("agent") is not None, most=200)
    held = store.policies.awaiting_approval("agent")
    assert held is not None
    assert (held.version, held.state) == (1, PolicyState.CANDIDATE)
    assert store.policies.live()["agent"].version == 0
    decision = store.decisions.decisions_of("agent", 1)[0]
    assert (decision.action, decision.decided_by) == (PolicyAction.HOLD, "sentinel")
    (doubt,) = decision.evidence["sentinel"]
    assert (doubt["check"], doubt["value"]) == ("second_judge", -1.0)
    assert decision.evidence["proof"]
    assert "agent@1 needs approval" in active_alarms(store)["approval_required:agent"]
    for number in range(24):
        agents_work(store, f"later-{number}", [0.0, 1.0], at=now)
    for later in range(5):
        controller.step(now + 100.0 + later)
    assert store.policies.live()["agent"].version == 0
    assert len(store.decisions.decisions_of("agent", 1)) == 1


@pytest.mark.slow
def test_a_person_promotes_what_is_held_and_training_goes_on(
    store: Store, make_controller: Callable[..., SteppedController]
) -> None:
    controller = make_controller(sentinel=SENTINEL, groups_per_round=24)
    now = disagreeing(store, controller, time.time())
    now = until(controller, now, lambda: store.policies.awaiting_approval("agent") is not None, most=200)
    assert store.policies.promote_manually("agent", None, by="anna", reason="read them").version == 1
    for number in range(24):
        agents_work(store, f"later-{number}", [0.0, 1.0], at=now)
    until(controller, now + 1.0, lambda: len(store.rounds.page("agent")) == 2, most=200)
    assert store.policies.live()["agent"].version == 1


@pytest.mark.slow
def test_a_person_takes_back_what_is_held_and_training_goes_on_from_the_live_version(
    store: Store, make_controller: Callable[..., SteppedController]
) -> None:
    controller = make_controller(sentinel=SENTINEL, groups_per_round=24)
    now = disagreeing(store, controller, time.time())
    now = until(controller, now, lambda: store.policies.awaiting_approval("agent") is not None, most=200)
    rejected = store.policies.roll_back_manually("agent", None, by="anna", reason="it flatters")
    assert [policy.version for policy in rejected] == [1]
    controller.step(now + 1.0)
    assert "approval_required:agent" not in active_alarms(store)
    for number in range(24):
        agents_work(store, f"later-{number}", [0.0, 1.0], at=now)
    until(controller, now + 2.0, lambda: len(store.rounds.page("agent")) == 2, most=200)
    assert store.rounds.page("agent")[0].from_version == 0


@pytest.mark.slow
def test_what_is_held_is_held_after_a_restart_too(
    store: Store, make_controller: Callable[..., SteppedController]
) -> None:
    controller = make_controller(sentinel=SENTINEL, groups_per_round=24)
    now = disagreeing(store, controller, time.time())
    now = until(controller, now, lambda: store.policies.awaiting_approval("agent") is not None, most=200)
    controller = make_controller(groups_per_round=24)  # the second judge is gone, the decision is not
    for later in range(3):
        controller.step(now + later)
    assert store.policies.live()["agent"].version == 0
    assert "approval_required:agent" in active_alarms(store)
    store.policies.roll_back_manually("agent", None, by="anna", reason="it flatters")
    make_controller(groups_per_round=24).step(now + 10.0)
    assert "approval_required:agent" not in active_alarms(store), "decided while no trainer ran"


@pytest.mark.slow
def test_a_ramp_that_its_own_second_judge_likes_is_held_by_the_sentinels(
    store: Store, make_controller: Callable[..., SteppedController]
) -> None:
    controller = make_controller(release=GUARDED | {"second_judge": AGREEING}, sentinel=SENTINEL)
    agents_work(store, "a", [0.0, 1.0])
    agents_work(store, "b", [1.0, 0.0])
    now = until(controller, time.time(), lambda: len(store.policies.all("agent")) == 2, most=200)
    now = disagreeing(store, controller, now)
    ramp_does_better(store)
    until(controller, now + 100.0, lambda: store.policies.awaiting_approval("agent") is not None, most=200)
    decision = store.decisions.decisions_of("agent", 1)[0]
    assert decision.action is PolicyAction.HOLD
    assert "the judges disagree" in decision.reason
    assert decision.evidence["second_judge"]["low"] > 0
    assert decision.evidence["live_minus_anchor"]["low"] > 0


@pytest.mark.slow
def test_it_is_only_an_alarm_where_one_says_so(store: Store, make_controller: Callable[..., SteppedController]) -> None:
    controller = make_controller(sentinel=SENTINEL | {"block_release": False}, groups_per_round=24)
    now = disagreeing(store, controller, time.time())
    until(controller, now, lambda: store.policies.live()["agent"].version == 1, most=200)
    assert store.policies.awaiting_approval("agent") is None


@pytest.mark.slow
def test_the_sentinels_second_judge_scores_a_ramp_if_the_release_has_none(
    store: Store, make_controller: Callable[..., SteppedController]
) -> None:
    unmoved = {"kind": "function", "function": "tests.harness.trainer.judge_samples:unmoved"}
    controller = make_controller(release=GUARDED | {"max_gain": 0.4}, sentinel=SENTINEL | {"second_judge": unmoved})
    agents_work(store, "a", [0.0, 1.0])
    agents_work(store, "b", [1.0, 0.0])
    now = until(controller, time.time(), lambda: len(store.policies.all("agent")) == 2, most=200)
    ramp_does_better(store)
    until(controller, now + 100.0, lambda: store.policies.awaiting_approval("agent") is not None, most=200)
    decision = store.decisions.decisions_of("agent", 1)[0]
    assert "the gain exceeds max_gain" in decision.reason
    assert "does not see the gain" in decision.reason, "the reason includes the second judge's result"
    assert store.policies.get("agent", 1).state is PolicyState.RAMP


def ramp_does_better(store: Store) -> None:
    draw = VersionDraw(shares={0: 0.55, 1: 0.45})
    for number in range(30):
        agents_work(store, f"new-{number}", [1.0, 1.0], version=1, at=time.time(), draw=draw)
        agents_work(store, f"old-{number}", [0.0, 0.2], version=0, at=time.time(), draw=draw)


@pytest.mark.slow
def test_status_and_the_commands_speak_of_what_is_held(
    store: Store, make_controller: Callable[..., SteppedController]
) -> None:

    controller = make_controller(sentinel=SENTINEL, groups_per_round=24)
    now = disagreeing(store, controller, time.time())
    until(controller, now, lambda: store.policies.awaiting_approval("agent") is not None, most=200)
    decision = read_awaiting_approval(store, "agent")
    assert decision is not None
    assert (decision["version"], decision["state"], decision["by"]) == (1, "candidate", "sentinel")
    assert "ranks the members" in decision["reason"]
    shown = CliRunner().invoke(
        cli, ["policies", "promote", "agent", "--store", controller.settings.store, "--reason", "ok"]
    )
    assert shown.exit_code == 0, shown.output
    assert "agent@1 is live" in shown.output
    assert read_awaiting_approval(store, "agent") is None
