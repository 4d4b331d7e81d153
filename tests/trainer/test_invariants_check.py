"""A version that breaks what the live one does is rejected before it serves; an equal one passes with evidence."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ratchet.store.records import Policy
from ratchet.store.states import PolicyState
from ratchet.store.store import Store
from ratchet.trainer.adapters.vllm_api import VllmServer
from ratchet.trainer.errors import EngineUnreachable
from ratchet.trainer.release.invariants import InvariantsCheck, RecordedPrompt, newest_prompts
from tests.harness.ports import free_port
from tests.harness.records import call_start, ended
from tests.harness.trainer.agents import agents_work
from tests.harness.trainer.scripted_engine import ScriptedEngine
from tests.harness.trainer.stepped_controller import SteppedController
from tests.harness.trainer.turns import until

RELEASE = {"policy": "guarded", "invariant_prompts": 8}


def record(store: Store, questions: Sequence[str], **changes: Any) -> None:
    """Ship a call for each question."""
    for number, question in enumerate(questions):
        messages = [{"role": "user", "content": question}]
        start = call_start(f"call_{question}", question, messages, at=2.0 + number, **changes)
        store.calls.ship([ended(start, {"role": "assistant", "content": "done"}, messages=messages)])


def traffic(store: Store, prompts: int = 8) -> None:
    """Two groups that can be trained, and calls with different prompts."""
    for name in ("a", "b"):
        agents_work(store, name, [0.0, 1.0])
    record(store, [f"question{number}" for number in range(prompts)])


def decided(store: Store) -> bool:
    return any(one.version == 1 and one.state is not PolicyState.CANDIDATE for one in store.policies.all("agent"))


def test_a_version_that_asks_in_place_of_acting_is_rejected_before_it_serves(
    store: Store, make_controller: Callable[..., SteppedController], engine: ScriptedEngine
) -> None:
    traffic(store)
    engine.reply = lambda name, messages: "Shall I go on?" if name == "agent@1" else "noted"
    until(make_controller(release=RELEASE), time.time(), lambda: decided(store))
    assert store.policies.get("agent", 1).state is PolicyState.REJECTED
    assert "agent@1" not in engine.loaded
    decision = store.decisions.decisions_of("agent", 1)[0]
    assert (decision.action, decision.decided_by) == ("reject", "invariants")
    where = "on 8 recent prompts questions in place of actions in 100% of the answers, 0% by the live version"
    assert decision.reason == where
    assert decision.evidence["invariants"]["broken"] is True
    alarm = next(one for one in store.alarms.active() if one.name == "version_broken:agent")
    assert where in alarm.reason


def test_an_equal_version_passes_with_the_evidence(
    store: Store, make_controller: Callable[..., SteppedController], engine: ScriptedEngine
) -> None:
    traffic(store)
    until(make_controller(release=RELEASE), time.time(), lambda: decided(store))
    assert store.policies.get("agent", 1).state is PolicyState.RAMP
    decision = store.decisions.decisions_of("agent", 1)[-1]
    assert "no invariant broken on 8 recent prompts" in decision.reason
    found = decision.evidence["invariants"]
    assert (found["prompts"], found["answers"], found["broken"]) == (8, 16, False)
    names = [request["model"] for request in engine.requests]
    assert sorted(set(names)) == ["agent@1", "base"]
    assert {request["max_tokens"] for request in engine.requests} == {1024}
    assert all("seed" not in request and "n" not in request for request in engine.requests)


def test_with_too_few_prompts_a_version_passes_and_the_decision_says_so(
    store: Store, make_controller: Callable[..., SteppedController], engine: ScriptedEngine
) -> None:
    traffic(store, 3)
    engine.reply = lambda name, messages: "" if name == "agent@1" else "noted"
    until(make_controller(release=RELEASE), time.time(), lambda: decided(store))
    assert store.policies.get("agent", 1).state is PolicyState.RAMP
    assert "not decided on 4 recent prompts" in (store.decisions.decisions_of("agent", 1)[-1].reason)


def test_requests_that_vllm_refuses_for_the_candidate_only_reject_it(
    store: Store, make_controller: Callable[..., SteppedController], engine: ScriptedEngine
) -> None:
    traffic(store)
    engine.refuse_chat = {"agent@1"}
    until(make_controller(release=RELEASE), time.time(), lambda: decided(store))
    assert store.policies.get("agent", 1).state is PolicyState.REJECTED
    assert "failed requests in 100%" in store.decisions.decisions_of("agent", 1)[0].reason


def test_a_replica_that_does_not_answer_stops_no_check(store: Store, engine: ScriptedEngine) -> None:
    record(store, [f"question{number}" for number in range(8)])
    engine.loaded["agent@1"] = "folder"
    names = ("base", "agent@1")
    live, candidate = (
        Policy(alias="agent", version=n, state=PolicyState.CANDIDATE, served_name=name, adapter=None, created_at=1.0)
        for n, name in enumerate(names)
    )
    replicas = [VllmServer(f"http://127.0.0.1:{free_port()}"), VllmServer(engine.url)]
    check = InvariantsCheck(store, replicas, alias="agent", prompts=8, max_tokens=64)
    assert check.evaluate(candidate, live, lambda: None).answers == 16
    engine.loaded.clear()
    with pytest.raises(EngineUnreachable):
        check.evaluate(candidate, live, lambda: None)
    for replica in replicas:
        replica.close()


def test_without_users_to_protect_no_request_is_sent(
    store: Store, make_controller: Callable[..., SteppedController], engine: ScriptedEngine
) -> None:
    traffic(store)
    until(make_controller(), time.time(), lambda: decided(store))
    assert store.policies.live()["agent"].version == 1
    assert not engine.requests


def test_prompts_are_the_newest_different_ones_of_each_role(store: Store) -> None:
    record(store, [f"plan{number}" for number in range(10, 20)], role="planner")
    record(store, ["code1", "code2"], role="coder")
    record(store, ["plan19"], role="planner")
    found = newest_prompts(store, "agent", 6)
    texts = [prompt.messages[-1]["content"] for prompt in found]
    assert sorted(texts) == ["code1", "code2", "plan16", "plan17", "plan18", "plan19"]
    assert found[0].tools[0]["function"]["name"] == "search"
    assert newest_prompts(store, "other", 6) == []


def test_prompts_with_images_or_unrecorded_sampling_parameters_are_left_out(store: Store) -> None:
    record(store, ["large"], sampling={"stop": True})
    record(store, ["text"], dialect="completions")
    record(store, ["greedy"], sampling={"temperature": 0.0})
    found = newest_prompts(store, "agent", 6)
    assert [prompt.messages[-1]["content"] for prompt in found] == ["greedy"]
    assert found[0].is_greedy


def test_a_recorded_prompt_is_sent_with_one_system_message_as_the_proxy_sends_it(store: Store) -> None:
    recorded = ({"role": "user", "content": "hi"}, {"role": "developer", "content": "Be brief."})
    prompt = RecordedPrompt(recorded, tools=(), sampling={}, family="")
    served = Policy(alias="agent", version=0, state=PolicyState.LIVE, served_name="base", adapter=None, created_at=0.0)
    (sent,) = prompt.messages_for(served, store)
    assert sent["role"] == "user"
    assert "Be brief." in sent["content"]


@pytest.mark.parametrize("limit", [16, None])
def test_an_answer_is_bounded_by_its_own_limit(
    store: Store, make_controller: Callable[..., SteppedController], engine: ScriptedEngine, limit: int | None
) -> None:
    for name in ("a", "b"):
        agents_work(store, name, [0.0, 1.0])
    sampling = {"temperature": 0.0} | ({"max_completion_tokens": limit} if limit else {})
    record(store, [f"question{number}" for number in range(16)], sampling=sampling)
    release = {"policy": "guarded", "invariant_prompts": 16, "invariant_max_tokens": 100}
    until(make_controller(release=release), time.time(), lambda: decided(store))
    assert {request["max_tokens"] for request in engine.requests} == {limit or 100}
    assert len(engine.requests) == 32, "greedy: one answer of each version to each of 16 prompts"
