"""Agents of real SDKs and frameworks, with nothing but the base URL and the key changed: one trajectory, exact."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ratchet.store.records import unpack_ids, unpack_logprobs
from ratchet.store.states import CallState
from tests.clients.conftest import ClientRuns
from tests.harness.clients.scenario import ANSWER, LOOP, SYSTEM
from tests.harness.clients.table import CLIENTS, Client
from tests.harness.proxy.scripted_vllm import END, logprob, render

pytestmark = pytest.mark.clients

RUNS = [pytest.param(c, s, id=c.marker(s)[1:-1].replace(" ", "-")) for c in CLIENTS for s in c.modes]
every_run = pytest.mark.parametrize(("client", "streamed"), RUNS)

# What the proxy asks of the engine for itself; everything else is the client's.
OURS = {"model", "logprobs", "top_logprobs", "return_token_ids", "stream_options"}


@every_run
def test_the_agent_comes_to_its_own_result(bench: ClientRuns, client: Client, streamed: bool) -> None:
    assert bench.result(client, streamed)["answer"] == ANSWER
    statuses = {(seen.method, seen.path, seen.status) for seen in bench.sent(client, streamed)}
    assert {status for _, _, status in statuses} == {200}, statuses


@every_run
def test_its_calls_are_one_trajectory_without_any_id(bench: ClientRuns, client: Client, streamed: bool) -> None:
    calls = bench.calls(client, streamed)
    assert len({call.trajectory_id for call in calls}) == 1
    assert [call.context for call in calls] == list(client.contexts)
    assert [call.parent_call for call in calls] == [None, *(call.id for call in calls[:-1])]
    assert calls[0].linked_by == "root"
    assert {call.linked_by for call in calls[1:]} <= set(client.linked_by)
    assert {(call.dialect, call.streamed) for call in calls} == {(client.dialect, streamed)}


@every_run
def test_every_token_is_the_engines(bench: ClientRuns, client: Client, streamed: bool) -> None:
    calls, upstream = bench.calls(client, streamed), bench.upstream(client, streamed)
    context: tuple[int, ...] = ()
    assert len(calls) == len(upstream) == len(client.scenario.sampled)
    for call, body, words in zip(calls, upstream, client.scenario.sampled, strict=True):
        assert (call.state, call.status, call.untrainable) == (CallState.ANSWERED, 200, None)
        (choice,) = call.choices
        sampled = (*words.encode(), END)
        assert unpack_ids(choice.token_ids) == sampled
        assert unpack_logprobs(choice.logprobs) == pytest.approx([logprob(k) for k in range(len(sampled))])
        prompt = (context if call.context == "exact" else ()) + unpack_ids(call.prompt_ids)
        assert prompt == tuple(render(body["messages"]))
        context = prompt + sampled


@every_run
def test_what_it_sends_reaches_the_engine(bench: ClientRuns, client: Client, streamed: bool) -> None:
    sent, upstream = bench.sent(client, streamed), bench.upstream(client, streamed)
    if client.dialect == "chat":
        assert [_clients(json.loads(seen.body)) for seen in sent] == [_clients(body) for body in upstream]
    last = upstream[-1]
    assert SYSTEM in str(last["messages"][0]["content"]) or client.scenario is not LOOP
    assert all(reply[:9] in str(last["messages"]) for reply in (client.scenario.search[0], client.scenario.read[0]))


@every_run
def test_the_engine_gets_the_whole_conversation(bench: ClientRuns, client: Client, streamed: bool) -> None:
    last = bench.upstream(client, streamed)[-1]
    messages = [(message["role"], _names(message)) for message in last["messages"] if not _is_reminder(message)]
    if client.scenario is not LOOP:
        assert {names for _, names in messages} == {()}  # reported in text
        return
    assert [tool["function"]["name"] for tool in last["tools"]][-2:] == ["search", "read"]
    assert messages == [
        ("system", ()),
        ("user", ()),
        ("assistant", ("search",)),
        ("tool", ()),
        ("assistant", ("read",)),
        ("tool", ()),
        ("assistant", ("search", "read")),
        ("tool", ()),
        ("tool", ()),
    ]


def _clients(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in OURS}


def _names(message: dict[str, Any]) -> tuple[str, ...]:
    return tuple(call["function"]["name"] for call in message.get("tool_calls") or ())


def _is_reminder(message: dict[str, Any]) -> bool:
    return "<system-reminder>" in str(message.get("content"))


def test_no_client_was_refused_anything(bench: ClientRuns) -> None:
    for future in bench.results.values():
        future.result()
    requests = [seen for seen in bench.witness.seen if not seen.path.startswith("/health/")]  # the bench's own are not
    assert [seen for seen in requests if seen.status >= 400] == []
