"""A candidate that answers held-out prompts worse never meets a user; held-out tasks are never trained on."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from ratchet.store.states import PolicyState, TrajectoryState
from ratchet.store.store import Store
from ratchet.trainer.release.evaluation import summarize_pairs
from ratchet.trainer.tasks import is_held_out
from tests.harness.trainer import judge_samples
from tests.harness.trainer.agents import agents_work
from tests.harness.trainer.scripted_engine import ScriptedEngine
from tests.harness.trainer.stepped_controller import SteppedController
from tests.harness.trainer.turns import until

GATE = {"policy": "immediate", "held_out_share": 0.3, "evaluation_samples": 2}


def tasks(held_out: bool, count: int) -> list[str]:
    """Names of tasks on one side."""
    names = (f"task/{number}" for number in range(1000))
    return [name for name in names if is_held_out(f"task:{name}", 0.3) is held_out][:count]


def ready_to_train(store: Store) -> list[str]:
    """Two groups that can be trained, and five held-out tasks; return the ids of what is held out."""
    for name in tasks(False, 2):
        agents_work(store, name, [0.0, 1.0])
    return [found for name in tasks(True, 5) for found in agents_work(store, name, [1.0, 0.0])]


def answering(engine: ScriptedEngine, new: float, old: float) -> None:
    """Have the candidate answer with one score and the live version with another."""
    judge_samples.by_answer.update({"new": new, "old": old})
    engine.reply = lambda name, messages: "new" if name == "agent@1" else "old"


def decided(store: Store) -> bool:
    return any(
        policy.version == 1 and policy.state is not PolicyState.CANDIDATE for policy in store.policies.all("agent")
    )


@pytest.mark.slow
def test_a_candidate_that_answers_worse_is_rejected_before_it_serves(
    store: Store, make_controller: Callable[..., SteppedController], engine: ScriptedEngine
) -> None:
    held = ready_to_train(store)
    answering(engine, new=0.2, old=0.9)
    until(make_controller(release=GATE | {"policy": "guarded"}), time.time(), lambda: decided(store))
    assert store.policies.get("agent", 1).state is PolicyState.REJECTED
    assert "agent@1" not in engine.loaded
    decision = store.decisions.decisions_of("agent", 1)[0]
    assert (decision.action, decision.decided_by) == ("reject", "evaluation")
    assert "on 5 held-out prompts 0.200 against 0.900" in decision.reason
    assert decision.evidence["evaluation"]["high"] < 0
    assert {store.trajectories.get(name).drop_reason for name in held} == {"held_out"}


def test_a_candidate_that_answers_as_well_goes_on_with_the_evidence(
    store: Store, make_controller: Callable[..., SteppedController], engine: ScriptedEngine
) -> None:
    ready_to_train(store)
    answering(engine, new=0.9, old=0.2)
    until(make_controller(release=GATE | {"max_gain": None}), time.time(), lambda: decided(store))
    assert store.policies.live()["agent"].version == 1
    found = store.decisions.decisions_of("agent", 1)[0].evidence["evaluation"]
    assert (found["prompts"], found["candidate"], found["live"]) == (5, 0.9, 0.2)
    request = engine.requests[0]
    assert request["messages"][-1]["role"] == "user"
    assert (request["temperature"], request["n"], bool(request["tools"])) == (1.0, 2, True)


@pytest.mark.slow
def test_prompts_that_the_judge_fails_on_do_not_count(
    store: Store, make_controller: Callable[..., SteppedController], engine: ScriptedEngine
) -> None:
    ready_to_train(store)
    judge_samples.by_answer.update({"new": ValueError("judge is down"), "old": 1.0})
    engine.reply = lambda name, messages: "new" if name == "agent@1" else "old"
    until(make_controller(release=GATE), time.time(), lambda: decided(store))
    assert store.policies.live()["agent"].version == 1  # nothing was shown either way
    assert "evaluation" not in store.decisions.decisions_of("agent", 1)[0].evidence


def test_only_tasks_of_the_share_are_held_out_and_a_larger_share_keeps_them() -> None:
    keys = [f"task:{number}" for number in range(2000)]
    small, large = ({key for key in keys if is_held_out(key, share)} for share in (0.1, 0.3))
    assert small < large
    assert 0.07 < len(small) / 2000 < 0.13
    assert not any(is_held_out(key, 0.0) for key in keys)


def test_trained_tasks_are_never_held_out(store: Store, make_controller: Callable[..., SteppedController]) -> None:
    for name in tasks(False, 2):
        agents_work(store, name, [0.0, 1.0])
    make_controller(release=GATE).step(time.time())
    assert store.trajectories.counts()[TrajectoryState.TRAINED] == 4


@pytest.mark.parametrize(
    ("gains", "worse"), [([-0.5, -0.4, -0.6, -0.5, -0.3], True), ([-0.5, 0.5, 0.1, -0.2, 0.0], False)]
)
def test_only_what_is_shown_to_be_worse_is_worse(gains: list[float], worse: bool) -> None:
    found = summarize_pairs([(0.5 + gain, 0.5) for gain in gains], unjudged=0)
    assert found is not None
    assert found.worse is worse
    assert summarize_pairs([(0.0, 1.0)] * 4, unjudged=0) is None


def requested_prompts(store: Store) -> list[str]:
    return store.trajectories.held_out_candidates("agent", "held_out", 5)


@pytest.mark.slow
def test_every_version_is_tried_with_the_same_prompts_once_there_are_enough(
    store: Store, make_controller: Callable[..., SteppedController], engine: ScriptedEngine
) -> None:
    ready_to_train(store)
    answering(engine, new=0.9, old=0.2)
    gate = GATE | {"max_gain": None, "evaluation_prompts": 5}
    until(make_controller(release=gate), time.time(), lambda: decided(store))
    before = requested_prompts(store)
    assert len(before) == 5
    for name in tasks(True, 8)[5:]:  # three that come later
        agents_work(store, name, [0.5, 0.5], at=50.0)
    for name in tasks(False, 4)[2:]:
        agents_work(store, name, [0.0, 1.0], at=50.0)
    controller = make_controller(release=gate)
    until(controller, time.time() + 1000.0, lambda: bool(store.decisions.decisions_of("agent", 2)))
    assert requested_prompts(store) == before
    first, second = (store.decisions.decisions_of("agent", version)[-1] for version in (1, 2))
    assert second.evidence["prompt_set"] == first.evidence["prompt_set"]
    assert (first.evidence["prompt_set_changed"], second.evidence["prompt_set_changed"]) == (False, False)


@pytest.mark.slow
def test_a_larger_set_of_prompts_is_marked_as_changed(
    store: Store, make_controller: Callable[..., SteppedController], engine: ScriptedEngine
) -> None:
    ready_to_train(store)
    answering(engine, new=0.9, old=0.2)
    gate = GATE | {"max_gain": None}
    until(make_controller(release=gate), time.time(), lambda: decided(store))
    for name in tasks(True, 7)[5:]:
        agents_work(store, name, [0.5, 0.5], at=50.0)
    for name in tasks(False, 4)[2:]:
        agents_work(store, name, [0.0, 1.0], at=50.0)
    until(make_controller(release=gate), time.time() + 1000.0, lambda: bool(store.decisions.decisions_of("agent", 2)))
    decision = store.decisions.decisions_of("agent", 2)[-1]
    assert decision.evidence["prompt_set_changed"] is True
    assert "(other prompts than " in decision.reason
