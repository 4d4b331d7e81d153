"""Linking calls to trajectories: the linker by itself, and through a running proxy."""

from __future__ import annotations

import time
from typing import Any

import openai
import pytest

from ratchet.proxy.coordinator.linking.linker import TrajectoryLinker
from ratchet.proxy.coordinator.linking.restore import leaf_from_store
from ratchet.proxy.errors import BadRequest
from ratchet.proxy.messages.link_records import AttemptKey, Leaf, Link, LinkEvidence, token_fingerprint
from ratchet.proxy.messages.text_fingerprints import fingerprints_of, short_key
from ratchet.store.content import messages as canon
from ratchet.store.records import OpenLeaf, pack_ids, unpack_ids
from ratchet.store.states import CallState
from tests.harness.proxy.running_proxy import Proxy, Start
from tests.harness.proxy.scripted_vllm import ScriptedVllm, render
from tests.harness.proxy.servers import eventually

Message = dict[str, Any]
USER: Message = {"role": "user", "content": "hi"}
REPLY: Message = {"role": "assistant", "content": "hello"}
NEXT: Message = {"role": "user", "content": "and now?"}


def evidence(messages: list[Message], key: str = "k", **more: Any) -> LinkEvidence:
    values: dict[str, Any] = {"alias": "agent", "version": None, "messages": messages, "key_id": key}
    digests = [
        canon.hashed(canon.ROOT, canon.ROOT, message)[2] for message in messages if message["role"] == "assistant"
    ]
    values |= {"keys": canon.link_keys(messages), "answer_digests": b"".join(digests), "arrived_at": 1.0}
    return LinkEvidence(**(values | more))


def answered(linker: TrajectoryLinker, prompt: list[Message], reply: Message, now: float = 1.0, key: str = "k") -> Link:
    """Link and end a call with this prompt and this reply."""
    link = linker.find_link(evidence(prompt, key))
    linker.begin_call(link, "agent", link.version or 0, now)
    keys = canon.link_keys(prompt)
    own, path, gap = canon.answer_keys((canon.ANYWHERE, keys[-1], keys[-2] if len(keys) > 1 else ""), reply)
    leaf = Leaf.of(
        trajectory_id=link.trajectory_id,
        call_id=f"call_{len(prompt)}_of_{link.trajectory_id}",
        choice=0,
        version=link.version or 0,
        link_key=short_key(path),
        tool_call_ids=canon.tool_call_ids(reply),
        key_id=key,
        sequence=token_fingerprint(pack_ids([1, 2, 3])),
        created_at=now,
        fingerprints=fingerprints_of(reply, gap if len(keys) > 1 else "", own, prompt),
    )
    linker.end_call(link, [leaf], now)
    return link


def restore(linker: TrajectoryLinker, stored: OpenLeaf) -> None:
    """Restore an answer of the store."""
    linker.restore_answers([(stored, leaf_from_store(stored))])
    linker.finish_restore(6.0)


def tool_reply(arguments: str, call_id: str = "call_1", **more: Any) -> Message:
    call = {"id": call_id, "type": "function", "function": {"name": "search", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call], **more}


@pytest.fixture
def linker() -> TrajectoryLinker:
    return TrajectoryLinker(idle_seconds=900)


@pytest.mark.parametrize(
    ("given", "echoed"),
    [
        (tool_reply('{"a": 1, "b": 2}'), tool_reply('{"a": 1, "b": 2}', content=None)),
        (tool_reply('{"a": 1, "b": 2}', content=None), tool_reply('{"b":2,"a":1}', content="")),
        (tool_reply("{}"), tool_reply("{ }", refusal=None, name="x", provider_specific_fields={})),
        (tool_reply("{}"), tool_reply("{}", call_id="rewritten")),
        (REPLY, {**REPLY, "content": [{"type": "text", "text": "hello"}]}),
        ({**REPLY, "reasoning": "hm"}, {**REPLY, "refusal": None, "tool_calls": []}),
    ],
)
def test_an_answer_is_recognized_however_the_agent_echoes_it(
    linker: TrajectoryLinker, given: Message, echoed: Message
) -> None:
    first = answered(linker, [USER], given)
    found = linker.find_link(evidence([USER, echoed, NEXT]))
    assert found.trajectory_id == first.trajectory_id
    assert found.linked_by.startswith("graph")


def test_parallel_runs_of_one_prompt_never_merge(linker: TrajectoryLinker) -> None:
    runs = {answered(linker, [USER], REPLY).trajectory_id for _ in range(8)}
    assert len(runs) == 8


def test_equal_answers_are_distinguished_by_tool_ids(linker: TrajectoryLinker) -> None:
    runs = [answered(linker, [USER], tool_reply("{}", f"call_{n}")).trajectory_id for n in range(5)]
    for n in (3, 0, 4, 1, 2):
        found = linker.find_link(evidence([USER, tool_reply("{}", f"call_{n}"), NEXT]))
        assert (found.trajectory_id, found.linked_by) == (runs[n], "graph+tool_ids")


def test_equal_answers_without_ids_are_each_continued_once(linker: TrajectoryLinker) -> None:
    runs = {answered(linker, [USER], REPLY, now=float(n)).trajectory_id for n in range(4)}
    continued = set()
    for _ in range(4):
        found = linker.find_link(evidence([USER, REPLY, NEXT]))
        linker.begin_call(found, "agent", 0, 9.0)
        continued.add(found.trajectory_id)
    assert continued == runs


def test_the_same_key_is_preferred_among_equal_answers(linker: TrajectoryLinker) -> None:
    mine = answered(linker, [USER], REPLY, now=1.0, key="mine")
    answered(linker, [USER], REPLY, now=2.0, key="other")
    assert linker.find_link(evidence([USER, REPLY, NEXT], key="mine")).trajectory_id == mine.trajectory_id


def test_the_deepest_answer_decides(linker: TrajectoryLinker) -> None:
    first = answered(linker, [USER], REPLY)
    second = answered(linker, [USER, REPLY, NEXT], tool_reply("{}"))
    assert second.trajectory_id == first.trajectory_id
    found = linker.find_link(evidence([USER, REPLY, NEXT, tool_reply("{}"), {"role": "tool", "content": "x"}]))
    assert found.parent is not None
    assert found.parent.tool_call_ids == ("call_1",)


def test_an_answer_that_the_proxy_did_not_give_starts_a_new_run(linker: TrajectoryLinker) -> None:
    answered(linker, [USER], REPLY)
    assert linker.find_link(evidence([USER, {**REPLY, "content": "hello?"}, NEXT])).linked_by == "root"


ATTEMPT = AttemptKey("agent", "k", "b2:prompt", "")


def test_a_retry_of_an_unanswered_attempt_is_the_same_run_and_each_attempt_counts_once(
    linker: TrajectoryLinker,
) -> None:
    lost = []
    for _ in range(2):
        link = linker.find_link(evidence([USER]))
        linker.begin_call(link, "agent", 3, 1.0)
        linker.end_call(link, [], 1.0)
        linker.add_unanswered(link, ATTEMPT, 1.0)
        lost.append(link.trajectory_id)
    again = [linker.find_link(evidence([USER], attempt=ATTEMPT, is_retry=True)) for _ in range(3)]
    assert [link.trajectory_id for link in again[:2]] == lost
    assert [link.linked_by for link in again] == ["retry", "retry", "root"]
    assert again[0].version == 3


def test_a_resend_without_the_sdks_header_counts_as_a_retry_for_a_minute(linker: TrajectoryLinker) -> None:
    link = linker.find_link(evidence([USER]))
    linker.begin_call(link, "agent", 3, 1.0)
    for arrived_at, by in ((100.0, "root"), (31.0, "resend")):
        linker.add_unanswered(link, ATTEMPT, 1.0)
        assert linker.find_link(evidence([USER], attempt=ATTEMPT, arrived_at=arrived_at)).linked_by == by


def test_an_explicit_id_wins_and_a_contradicting_version_is_refused(linker: TrajectoryLinker) -> None:
    answered(linker, [USER], REPLY)
    link = linker.find_link(evidence([USER, REPLY, NEXT], explicit="mine", explicit_by="header"))
    assert (link.trajectory_id, link.parent, link.linked_by) == ("mine", None, "header")
    linker.begin_call(link, "agent", 1, 1.0)
    assert linker.find_link(evidence([USER], explicit="mine", explicit_by="path")).version == 1
    with pytest.raises(BadRequest, match="uses agent@1"):
        linker.find_link(evidence([USER], explicit="mine", explicit_by="path", version=2))


def test_memory_is_bounded_and_idle_runs_are_forgotten() -> None:
    linker = TrajectoryLinker(idle_seconds=10, max_bytes=150_000)
    for n in range(200):
        answered(linker, [USER], {**REPLY, "content": str(n)}, now=float(n))
    assert len(linker) <= 50
    assert linker.find_link(evidence([USER, {**REPLY, "content": "5"}, NEXT])).linked_by == "root"
    assert linker.find_link(evidence([USER, {**REPLY, "content": "199"}, NEXT])).linked_by == "graph"


def test_a_finished_run_is_forgotten(linker: TrajectoryLinker) -> None:
    link = answered(linker, [USER], REPLY)
    linker.forget_trajectory(link.trajectory_id)
    assert linker.find_link(evidence([USER, REPLY, NEXT])).linked_by == "root"
    assert linker.count_pins(1.0, 30) == {}


def test_pins_count_active_and_running_runs(linker: TrajectoryLinker) -> None:
    answered(linker, [USER], REPLY, now=1.0)
    running = linker.find_link(evidence([USER]))
    linker.begin_call(running, "agent", 4, 1.0)
    assert linker.count_pins(2.0, 30) == {"agent@0": 1, "agent@4": 1}
    assert linker.count_pins(100.0, 30) == {"agent@4": 1}
    answered(linker, [USER], {**REPLY, "content": "later"}, now=101.0)
    linker.end_call(running, [], 102.0)
    assert linker.count_pins(110.0, 30) == {"agent@0": 1, "agent@4": 1}
    assert linker.count_pins(131.5, 30) == {"agent@4": 1}
    linker.forget_trajectory(running.trajectory_id)
    assert linker.count_pins(131.5, 30) == {}


def test_the_cost_of_pins_does_not_grow_with_the_open_runs() -> None:
    linker = TrajectoryLinker(idle_seconds=900)
    for n in range(5_000):
        answered(linker, [USER], {**REPLY, "content": str(n)}, now=n / 1000)
    began = time.thread_time()
    for _ in range(1_000):
        assert linker.count_pins(5.0, 30) == {"agent@0": 5_000}
    assert time.thread_time() - began < 0.2


def test_a_restored_answer_is_continued(linker: TrajectoryLinker) -> None:
    leaf = OpenLeaf(
        trajectory_id="traj_old",
        call_id="call_old",
        choice=0,
        alias="agent",
        version=2,
        link_key=canon.link_keys([USER, REPLY])[-1],
        tool_call_ids=(),
        key_id="k",
        purpose="live",
        sequence=pack_ids([7, 8]),
        last_active_at=5.0,
    )
    restore(linker, leaf)
    found = linker.find_link(evidence([USER, REPLY, NEXT]))
    assert (found.trajectory_id, found.version) == ("traj_old", 2)
    assert found.parent is not None
    assert found.parent.is_prefix_of(pack_ids([7, 8, 9]))
    assert not found.parent.is_prefix_of(pack_ids([7, 9, 8]))
    assert not found.parent.is_prefix_of(pack_ids([7]))


@pytest.mark.parametrize(("purpose", "version", "joins"), [
    ("live", None, True), ("live", 2, False), ("eval", 2, True), ("eval", None, False),
])  # fmt: skip
def test_after_a_restart_evaluations_and_live_runs_stay_apart(
    linker: TrajectoryLinker, purpose: str, version: int | None, joins: bool
) -> None:
    leaf = OpenLeaf(
        trajectory_id="traj_old",
        call_id="call_old",
        choice=0,
        alias="agent",
        version=2,
        link_key=canon.link_keys([USER, REPLY])[-1],
        tool_call_ids=(),
        key_id="k",
        purpose=purpose,
        sequence=b"",
        last_active_at=5.0,
    )
    restore(linker, leaf)
    found = linker.find_link(evidence([USER, REPLY, NEXT], version=version))
    assert (found.trajectory_id == "traj_old") is joins
    assert found.purpose == ("live" if version is None else "eval")


def test_a_named_trajectory_keeps_its_purpose(linker: TrajectoryLinker) -> None:
    trial = linker.find_link(evidence([USER], explicit="trial", explicit_by="header", version=1))
    linker.begin_call(trial, "agent", 1, 1.0)
    followed = linker.find_link(evidence([USER], explicit="trial", explicit_by="header"))
    assert (followed.version, followed.purpose) == (1, "eval")
    work = linker.find_link(evidence([USER], explicit="work", explicit_by="header"))
    linker.begin_call(work, "agent", 1, 1.0)
    with pytest.raises(BadRequest, match="work is not an evaluation"):
        linker.find_link(evidence([USER], explicit="work", explicit_by="header", version=1))


def test_failures_with_one_body_take_bounded_memory(linker: TrajectoryLinker) -> None:
    for number in range(1000):
        linker.add_unanswered(Link(f"traj_{number}", 0, "root"), ATTEMPT, 1.0)
    assert len(linker._attempts) == 64


# --- through a running proxy ----------------------------------------------------------------------------------


def run(agent: openai.OpenAI, first: str, turns: int) -> list[Any]:
    """Run an agent that sends its history with each call; return its messages."""
    messages: list[Any] = [{"role": "user", "content": first}]
    for turn in range(turns):
        answer = agent.chat.completions.create(model="agent", messages=messages)
        messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": f"turn {turn} {first}"}]
    return messages


def test_a_run_of_many_turns_is_one_trajectory_and_stores_each_token_once(proxy: Proxy) -> None:
    messages = run(proxy.agent(), "start", 5)
    proxy.settled()
    calls = proxy.store.calls.page(10)[::-1]
    assert len({call.trajectory_id for call in calls}) == 1
    assert [call.context for call in calls] == ["root", "exact", "exact", "exact", "exact"]
    assert [call.linked_by for call in calls] == ["root", "graph", "graph", "graph", "graph"]
    stored = sum((unpack_ids(call.prompt_ids) + unpack_ids(call.choices[0].token_ids) for call in calls), ())
    assert stored == tuple(render(messages[:-2])) + unpack_ids(calls[-1].choices[0].token_ids)


def test_a_context_that_drifted_is_a_fork_and_keeps_its_own_prompt(proxy: Proxy) -> None:
    messages = run(proxy.agent(), "#tool=search #drift", 2)
    call = proxy.last_call()
    assert (call.context, call.linked_by) == ("fork", "graph+tool_ids")
    assert unpack_ids(call.prompt_ids) == tuple(render(messages[:-2]))
    exact = run(proxy.agent(), "#tool=search", 2)
    proxy.settled()
    assert exact
    assert proxy.store.calls.page(1)[0].context == "exact"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "headers", "body", "by"),
    [
        ("/t/job-7/v1/chat/completions", {}, {}, "path"),
        ("/t/job-7/chat/completions", {}, {}, "path"),
        ("/v1/chat/completions", {"x-ratchet-trajectory": "job-7"}, {}, "header"),
        ("/v1/chat/completions", {"x-session-id": "job-7"}, {}, "header"),
        ("/v1/chat/completions", {"x-claude-code-session-id": "job-7"}, {}, "header"),
        ("/v1/chat/completions", {}, {"metadata": {"trajectory_id": "job-7"}}, "body"),
    ],
)
def test_ids_are_accepted_in_path_header_and_body(proxy: Proxy, path: str, headers: Any, body: Any, by: str) -> None:
    more = {"x-ratchet-task": "sums", "x-ratchet-role": "planner", "x-ratchet-tags": "a, b"}
    for _ in range(2):
        request = {"model": "agent", "messages": [USER], **body}
        answer = proxy.http.post(path, json=request, headers=headers | more)
        assert answer.headers["x-ratchet-trajectory"] == "job-7"
    proxy.settled()
    assert {(c.trajectory_id, c.linked_by, c.role) for c in proxy.store.calls.page(9)} == {("job-7", by, "planner")}
    assert proxy.store.trajectories.get("job-7").task == "sums"


@pytest.mark.parametrize("name", ["a b", ".", "..", "x" * 101])
def test_an_invalid_id_is_refused(proxy: Proxy, name: str) -> None:
    request = {"model": "agent", "messages": [USER]}
    answer = proxy.http.post("/v1/chat/completions", json=request, headers={"x-ratchet-trajectory": name})
    assert answer.status_code == 400
    assert "trajectory id" in answer.json()["error"]["message"]


def test_a_session_in_another_format_is_a_trajectory_too(proxy: Proxy) -> None:
    request, sessions = {"model": "agent", "messages": [USER]}, ("aGVs/bG8=", "aGVs/bG8=", "a b")
    answers = [proxy.http.post("/v1/chat/completions", json=request, headers={"x-session-id": s}) for s in sessions]
    first, again, other = (answer.headers["x-ratchet-trajectory"] for answer in answers)
    assert first == again != other
    assert first.startswith("session-")


def test_an_id_may_hold_points(proxy: Proxy) -> None:
    request = {"model": "agent", "messages": [USER]}
    for name in ("...", "..a", "v1.2"):
        answer = proxy.http.post("/v1/chat/completions", json=request, headers={"x-ratchet-trajectory": name})
        assert answer.headers["x-ratchet-trajectory"] == name


def test_an_sdks_retries_are_one_trajectory(proxy: Proxy, vllm: ScriptedVllm) -> None:
    vllm.failures_left = 2
    answer = proxy.agent(max_retries=3).chat.completions.create(model="agent", messages=[USER])  # type: ignore[list-item]
    assert answer.choices
    proxy.settled()
    calls = proxy.store.calls.page(9)[::-1]
    assert len({call.trajectory_id for call in calls}) == 1
    assert [call.linked_by for call in calls] == ["root", "retry", "retry"]
    assert [call.state for call in calls] == [CallState.FAILED, CallState.FAILED, CallState.ANSWERED]


@pytest.mark.slow
def test_a_timeout_during_the_first_attempt_gives_one_run_of_aborted_attempts(proxy: Proxy, vllm: ScriptedVllm) -> None:
    slow: Any = [{"role": "user", "content": "#tokens=400 #delay=0.02"}]
    with pytest.raises(openai.APITimeoutError):
        proxy.agent(max_retries=1, timeout=1.5).chat.completions.create(model="agent", messages=slow)
    eventually(lambda: vllm.aborted == 2 and len(proxy.store.calls.page(9, state=CallState.ABORTED)) == 2)
    calls = proxy.store.calls.page(9)[::-1]
    assert [call.linked_by for call in calls] == ["root", "retry"]
    assert len({call.trajectory_id for call in calls}) == 1


def test_a_retry_of_an_answered_call_is_recognized_by_its_history(linker: TrajectoryLinker) -> None:
    run = answered(linker, [USER], REPLY)
    for again, by in ((False, "graph"), (True, "retry")):
        link = linker.find_link(evidence([USER, REPLY, NEXT], attempt=ATTEMPT, is_retry=again))
        linker.begin_call(link, "agent", 0, 2.0)
        assert (link.trajectory_id, link.linked_by) == (run.trajectory_id, by)


def test_runs_are_continued_after_a_restart_of_the_proxy(start: Start, tmp_path: Any) -> None:
    first = start()
    messages = run(first.agent(), "start", 2)
    first.settled()
    second = start(journal=tmp_path / "journal-2")
    second.agent().chat.completions.create(model="agent", messages=messages)
    call = second.last_call()
    assert (call.linked_by, call.context) == ("graph", "exact")
    assert len({c.trajectory_id for c in second.store.calls.page(9)}) == 1
