"""A candidate is tried in the background: nobody waits for it, a restart goes on, and a failure never passes it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from ratchet.store.states import PolicyAction, PolicyState, TrajectoryState
from ratchet.store.store import Store
from ratchet.trainer.errors import TuningError
from ratchet.trainer.release.evaluation import KIND, EvaluationResult, EvaluationRunner, PairedEvaluation
from tests.harness.ports import free_port
from tests.harness.trainer.agents import agents_work
from tests.harness.trainer.scripted_engine import ScriptedEngine
from tests.harness.trainer.stepped_controller import SteppedController
from tests.harness.trainer.turns import until
from tests.trainer.test_evaluation import GATE, answering, ready_to_train, tasks

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
