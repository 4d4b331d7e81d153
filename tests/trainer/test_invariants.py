"""Invariants: what a version must not break, decided on enough prompts, and where they are checked."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ratchet.store.records import Policy
from ratchet.store.states import PolicyState
from ratchet.store.store import Store
from ratchet.trainer.adapters.vllm_api import SampledAnswer, VllmServer
from ratchet.trainer.errors import EngineUnreachable
from ratchet.trainer.release.invariants import (
    ALPHA,
    MAX_TOKENS,
    AnswerPair,
    CheckedAnswer,
    Fault,
    InvariantsCheck,
    InvariantsResult,
    RecordedPrompt,
    conditional_p_value,
    judge_answers,
    newest_prompts,
    read_answer,
)
from tests.harness.ports import free_port
from tests.harness.records import call_start, ended
from tests.harness.trainer.agents import agents_work
from tests.harness.trainer.scripted_engine import ScriptedEngine
from tests.harness.trainer.stepped_controller import SteppedController, until

RELATIVE = (Fault.LONG, Fault.UNCERTAIN)  # by the other answers to the same prompt
Draw = Callable[[random.Random, float], CheckedAnswer]  # with what the prompt makes likely, 0 to 1
TOOLS = frozenset({"search"})


def answers(rng: random.Random, difficulty: float, rate: float = 0.0, fault: Fault = Fault.EMPTY) -> CheckedAnswer:
    """An answer of an agent whose faults, lengths and certainty depend on the prompt."""
    ordinary = {one for one in Fault if one not in RELATIVE and rng.random() < 0.3 * difficulty}
    faults = ordinary | ({fault} if rng.random() < rate else set())
    return CheckedAnswer(
        frozenset(faults), 1 + int(rng.lognormvariate(3 + 2 * difficulty, 0.8)), rng.gammavariate(2, 0.3)
    )


def releases(count: int, prompts: int, candidate: Draw, live: Draw, samples: int = 2) -> list[InvariantsResult]:
    rng = random.Random(prompts)
    found = []
    for _ in range(count):
        difficulties = [rng.random() for _ in range(prompts)]
        pairs = [
            AnswerPair([candidate(rng, d) for _ in range(samples)], [live(rng, d) for _ in range(samples)])
            for d in difficulties
        ]
        found.append(judge_answers(pairs))
    return found


@pytest.mark.slow
def test_an_equal_version_is_rejected_at_most_once_in_a_thousand() -> None:
    found = [one for prompts in (8, 16, 64) for one in releases(1_000, prompts, answers, answers)]
    assert sum(one.broken for one in found) <= 3
    significant = sum(shares.p_value <= ALPHA / len(Fault) for one in found for shares in one.faults)
    assert significant <= 3, "also without the least increase: that is the theorem"


@pytest.mark.slow
@pytest.mark.parametrize("fault", [one for one in Fault if one not in RELATIVE])
def test_a_clear_break_of_any_kind_is_rejected(fault: Fault) -> None:
    def broken(rng: random.Random, difficulty: float) -> CheckedAnswer:
        return answers(rng, difficulty, 0.4, fault)

    found = releases(100, 64, broken, answers)
    assert sum(one.broken for one in found) >= 95
    named = [shares.fault for one in found for shares in one.faults if shares.broken]
    assert named.count(fault) >= 95


def test_longer_and_less_likely_answers_are_breaks() -> None:
    def longer(rng: random.Random, difficulty: float) -> CheckedAnswer:
        one = answers(rng, difficulty)
        return CheckedAnswer(one.faults, 20 * (one.tokens or 0), one.uncertainty)

    def noise(rng: random.Random, difficulty: float) -> CheckedAnswer:
        one = answers(rng, difficulty)
        return CheckedAnswer(one.faults, one.tokens, 4.0 + (one.uncertainty or 0.0))

    for changed, fault in ((longer, Fault.LONG), (noise, Fault.UNCERTAIN)):
        found = releases(20, 64, changed, answers)
        assert all({shares.fault for shares in one.faults if shares.broken} == {fault} for one in found)


def test_a_small_increase_passes_however_many_prompts_show_it() -> None:
    def worse(rng: random.Random, difficulty: float) -> CheckedAnswer:
        return CheckedAnswer(frozenset({Fault.QUESTION} if rng.random() < 0.12 else ()))

    result = releases(1, 1_000, worse, lambda rng, _: CheckedAnswer())[0]
    assert not result.broken
    assert "1000 recent prompts" in result.describe()


def test_too_few_prompts_decide_nothing_and_say_so() -> None:
    broken, good = CheckedAnswer(frozenset({Fault.EMPTY})), CheckedAnswer()
    few = judge_answers([AnswerPair([broken, broken], [good, good])] * 5)
    assert (few.broken, few.decidable) == (False, False)
    assert "not decided on 5 recent prompts" in few.describe()
    enough = judge_answers([AnswerPair([broken, broken], [good, good])] * 6)
    assert enough.broken
    assert "6 recent prompts empty answers in 100%" in enough.describe()
    assert judge_answers([]).decidable is False


def test_the_p_value_is_exact() -> None:
    assert conditional_p_value([]) == 1.0
    assert conditional_p_value([(0, 0, 2, 2), (2, 2, 2, 2)]) == 1.0
    assert conditional_p_value([(1, 0, 1, 1)] * 3) == pytest.approx(1 / 8)
    assert conditional_p_value([(2, 0, 2, 2)]) == pytest.approx(1 / 6)
    assert conditional_p_value([(1, 0, 1, 1), (0, 1, 1, 1)]) == pytest.approx(3 / 4)


def call(name: str = "search", arguments: str = '{"q": "x"}') -> dict[str, object]:
    return {"content": None, "tool_calls": [{"id": "1", "function": {"name": name, "arguments": arguments}}]}


@pytest.mark.parametrize(
    ("message", "faults"),
    [
        ({"content": "It is 42."}, set()),
        ({"content": "Did you know? It is 42."}, {Fault.QUESTION}),
        ({"content": "First. What for?\nIt is 42."}, set()),
        ({"content": "Shall I search the mails for you?"}, {Fault.QUESTION}),
        ({"content": ""}, {Fault.EMPTY}),
        ({"content": "<think>what now?</think>  "}, {Fault.EMPTY}),
        ({"content": "I'm sorry, but I can't help with that."}, {Fault.REFUSAL}),
        ({"content": "I cannot access your mails."}, {Fault.REFUSAL}),
        ({"content": "They said that they cannot come."}, set()),
        (call(), set()),
        (call(arguments=""), set()),
        (call("delete"), {Fault.INVALID_TOOL_CALL}),
        (call(arguments='{"q": '), {Fault.INVALID_TOOL_CALL}),
        (call(arguments="[1]"), {Fault.INVALID_TOOL_CALL}),
        ({"content": '<tool_call>{"name": "search"'}, {Fault.INVALID_TOOL_CALL}),
        ({"content": "and so on " * 60}, {Fault.REPETITION}),
        ({"content": " ".join(f"item {n} costs {n * n % 97}" for n in range(80))}, set()),
    ],
)  # fmt: skip
def test_the_faults_of_an_answer(message: dict[str, object], faults: set[Fault]) -> None:
    sampled = SampledAnswer({"role": "assistant", **message}, "stop", 5, (-0.5, -1.5))
    found = read_answer(sampled, TOOLS)
    assert found.faults == faults
    assert (found.tokens, found.uncertainty) == (5, 1.0)


def test_of_an_answer_that_was_cut_only_length_and_repetition_count() -> None:
    cut = read_answer(SampledAnswer(call(arguments='{"q": '), "length", 1024, ()), TOOLS)
    assert (cut.faults, cut.uncertainty) == ({Fault.UNFINISHED}, None)


def test_a_question_is_an_answer_where_no_tool_is_offered() -> None:
    assert not read_answer(SampledAnswer({"content": "Which one?"}, "stop", 3, ()), frozenset()).faults


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
    release = {"policy": "guarded", "invariant_prompts": 16}
    until(make_controller(release=release), time.time(), lambda: decided(store))
    assert {request["max_tokens"] for request in engine.requests} == {limit or MAX_TOKENS}
    assert len(engine.requests) == 32, "greedy: one answer of each version to each of 16 prompts"
