"""Evaluations: held-out prompts, two judges, what they decide and when they run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from ratchet.store.states import PolicyAction, PolicyState, TrajectoryState
from ratchet.store.store import Store
from ratchet.trainer.errors import TuningError
from ratchet.trainer.release.evaluation import (
    KIND,
    EvaluationResult,
    EvaluationRunner,
    PairedEvaluation,
    summarize_pairs,
)
from ratchet.trainer.tasks import is_held_out
from tests.harness.ports import free_port
from tests.harness.trainer import judge_samples
from tests.harness.trainer.agents import agents_work
from tests.harness.trainer.scripted_engine import ScriptedEngine
from tests.harness.trainer.stepped_controller import SteppedController, until

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


UNMOVED = {"kind": "function", "function": "tests.harness.trainer.judge_samples:unmoved"}
EVALUATED = EvaluationResult(PairedEvaluation(10, 0, 0.6, 0.5, 0.1, 0.05, 0.15))


@pytest.fixture
def slow(engine: ScriptedEngine) -> Iterator[threading.Event]:
    """vLLM answers no chat call before this is set; the candidate answers a little better then."""
    answering(engine, new=0.9, old=0.6)
    reply, may_answer = engine.reply, threading.Event()

    def wait(name: str, messages: Sequence[Any]) -> str:
        may_answer.wait(180)
        return reply(name, messages)

    engine.reply = wait
    yield may_answer
    may_answer.set()


@pytest.mark.slow
def test_while_a_candidate_is_tried_others_are_judged_and_nothing_is_trained(
    store: Store, make_controller: Callable[..., SteppedController], slow: threading.Event
) -> None:
    ready_to_train(store)
    controller = make_controller(release=GATE)
    now = time.time()
    controller.step(now)
    later = [name for task in tasks(False, 6)[2:] for name in agents_work(store, task, [0.0, 1.0], at=time.time())]
    began = time.monotonic()
    for turn in range(4):
        controller.step(now + 400.0 + turn)
    assert time.monotonic() - began < 150.0, "no turn waited for vLLM's answers"
    assert len(store.groups.awaiting_round("agent")) == 4
    assert {store.trajectories.get(name).state for name in later} == {TrajectoryState.GROUPED}
    assert len(store.rounds.page("agent")) == 1
    assert store.policies.get("agent", 1).state is PolicyState.CANDIDATE
    slow.set()
    until(controller, now + 500.0, lambda: len(store.rounds.page("agent")) > 1)
    assert store.policies.get("agent", 1).state is not PolicyState.CANDIDATE
    assert store.decisions.decisions_of("agent", 1)[-1].evidence["evaluation"]["prompts"] == 5


@pytest.mark.slow
def test_prompts_are_answered_by_a_replica_that_serves_both_versions(
    store: Store, make_controller: Callable[..., SteppedController], engine: ScriptedEngine
) -> None:
    ready_to_train(store)
    answering(engine, new=0.9, old=0.6)
    away = f"http://127.0.0.1:{free_port()}"
    controller = make_controller(release=GATE, vllm=(away, engine.url), adapters={"quorum": 1})
    until(controller, time.time(), lambda: store.policies.live()["agent"].version == 1)
    assert store.decisions.decisions_of("agent", 1)[-1].evidence["evaluation"]["prompts"] == 5


@pytest.mark.slow
def test_a_trainer_that_is_killed_while_a_candidate_is_tried_tries_it_again_and_decides_once(
    store: Store, make_controller: Callable[..., SteppedController], slow: threading.Event
) -> None:
    ready_to_train(store)
    now = time.time()
    make_controller(release=GATE).step(now)
    assert store.observations.newest("agent", KIND, 10) == []
    for task in tasks(False, 6)[2:]:
        agents_work(store, task, [0.0, 1.0], at=time.time())
    slow.set()
    controller = make_controller(release=GATE)  # the first one is never asked again, as if it were dead
    until(controller, now + 400.0, lambda: store.policies.live()["agent"].version == 1)
    assert [one.action for one in store.decisions.decisions_of("agent", 1)] == [PolicyAction.PROMOTE]
    assert len(store.rounds.page("agent")) == 1, "it was decided on before another round began"


@pytest.mark.slow
def test_what_was_found_before_a_kill_is_decided_on_without_trying_again(
    store: Store, make_controller: Callable[..., SteppedController], engine: ScriptedEngine
) -> None:
    ready_to_train(store)
    answering(engine, new=0.2, old=0.9)
    controller = make_controller(release=GATE)
    controller.step(time.time())
    eventually(lambda: len(store.observations.newest("agent", KIND, 10)) == 1)
    request_count = len(engine.requests)
    assert store.policies.get("agent", 1).state is PolicyState.CANDIDATE
    until(
        make_controller(release=GATE), time.time(), lambda: store.policies.get("agent", 1).state is PolicyState.REJECTED
    )
    assert len(engine.requests) == request_count
    assert "0.200 against 0.900" in store.decisions.decisions_of("agent", 1)[0].reason


def test_an_evaluation_that_fails_is_an_alarm_and_passes_nobody(store: Store) -> None:
    clock = [0.0]

    class FailingEvaluator:
        tried = 0

        def evaluate(self, candidate: Any, live: Any, check: Callable[[], None]) -> EvaluationResult:
            self.tried += 1
            if self.tried < 3:
                raise TuningError("every rollout failed")
            return EVALUATED

        def close(self) -> None:
            pass

    failing = FailingEvaluator()
    evaluations = EvaluationRunner(store, "agent", failing, EvaluationResult, KIND, clock=lambda: clock[0])
    store.rounds.commit(store.rounds.start("agent", 0).id, version=1, checkpoint="/c/1", groups=[], metrics={})
    candidate, live = store.policies.get("agent", 1), store.policies.get("agent", 0)
    for again in (1, 2):
        assert evaluations.result_for(candidate, live) is None
        eventually(lambda: not evaluations.is_running)
        assert evaluations.result_for(candidate, live) is None
        assert failing.tried == again
        assert evaluations.is_running, "it is left alone for a while"
        (alarm,) = store.alarms.active()
        assert "every rollout failed" in alarm.reason
        clock[0] += 61.0
    assert evaluations.result_for(candidate, live) is None
    eventually(lambda: not evaluations.is_running)
    assert evaluations.result_for(candidate, live) == EVALUATED
    assert store.alarms.active() == []
    evaluations.close()


@pytest.mark.slow
def test_a_jump_on_held_out_tasks_waits_for_a_person_before_it_serves_anybody(
    store: Store, make_controller: Callable[..., SteppedController], engine: ScriptedEngine
) -> None:
    ready_to_train(store)
    answering(engine, new=1.0, old=0.2)
    controller = make_controller(release=GATE | {"policy": "guarded", "max_gain": 0.5})
    until(controller, time.time(), lambda: store.policies.awaiting_approval("agent") is not None)
    decision = store.decisions.decisions_of("agent", 1)[0]
    assert (decision.action, decision.decided_by) == (PolicyAction.HOLD, "evaluation")
    assert "the gain exceeds max_gain" in decision.reason
    assert [policy.version for policy in store.policies.serving()] == [0]


@pytest.mark.slow
def test_a_second_judge_that_sees_no_gain_in_the_same_answers_holds_the_candidate(
    store: Store, make_controller: Callable[..., SteppedController], engine: ScriptedEngine
) -> None:
    ready_to_train(store)
    answering(engine, new=0.9, old=0.6)
    controller = make_controller(release=GATE | {"second_judge": UNMOVED})
    until(controller, time.time(), lambda: store.policies.awaiting_approval("agent") is not None)
    decision = store.decisions.decisions_of("agent", 1)[0]
    assert "does not see the gain of +0.300" in decision.reason
    assert decision.evidence["second_evaluation"]["difference"] == 0.0
    assert decision.evidence["evaluation"]["difference"] == pytest.approx(0.3)


def eventually(holds: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_judge_that_is_down_shows_nothing_either_way() -> None:
    assert EvaluationResult(None).blocking_reason(0.5) is None
    assert EvaluationResult(EVALUATED.first).blocking_reason(0.5) is None
    failed = EvaluationResult(EVALUATED.first, None, "second").blocking_reason(None)
    assert str(failed).startswith("second judge second failed on ")
