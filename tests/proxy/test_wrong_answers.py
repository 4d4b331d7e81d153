"""Answers that vLLM does not give: malformed ones, refusals, filters, and streams that fall silent."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from ratchet.store.states import CallState
from ratchet.store.store import Store, open_store
from ratchet.store.verify import verify
from tests.harness.proxy.raw_upstream import RawUpstream, http, stream
from tests.harness.proxy.running_proxy import Proxy, Start, running
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import eventually
from tests.proxy.test_agents import call
from tests.proxy.test_other_models import entry

MESSAGE = {"role": "assistant", "content": "ok"}
CALLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
}


def answer(message: Any = MESSAGE, choice: dict[str, Any] | None = None, **fields: Any) -> bytes:
    """Return the body of a correct answer with these changes."""
    logprobs = {"content": [{"logprob": -0.1}, {"logprob": -0.2}]}
    first = {"index": 0, "message": message, "finish_reason": "stop", "token_ids": [1, 2], "logprobs": logprobs}
    body = {"id": "x", "object": "chat.completion", "created": 1, "model": "base", "prompt_token_ids": [1]}
    return json.dumps(body | {"choices": [first | (choice or {})]} | fields).encode()


def delta(**fields: Any) -> bytes:
    """Return a streamed chunk."""
    return json.dumps({"id": "x", "choices": [{"index": 0, "delta": fields, "token_ids": [5]}]}).encode()


def called(**fields: Any) -> dict[str, Any]:
    """Return a message with one tool call."""
    function = {"name": "look", "arguments": "{}"} | fields.pop("function", {})
    return {**MESSAGE, "tool_calls": [{"id": "a", "type": "function", "function": function} | fields]}


@pytest.fixture(scope="module")
def proxy(upstream: RawUpstream, migrated: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    folder = tmp_path_factory.mktemp("proxy")
    store = open_store(str(folder / "store.db"))
    with running(upstream.url, store, folder, breaker_failure_threshold=10**6, request_timeout_seconds=5.0) as one:
        yield one
    store.close()


WHOLE = {
    "no JSON": http(b"{nope"),
    "nothing": http(b""),
    "another value": http(b"null"),
    "not UTF-8": http(answer().replace(b'"ok"', b'"\xff\xfe"')),
    "a number that is none": http(answer().replace(b"-0.1", b"NaN")),
    "no message": http(answer(None)),
    "a number for a text": http(answer({"role": "assistant", "content": 5})),
    "a number for an id": http(answer(called(id=5))),
    "too deep": http(answer().replace(b'"ok"', b"[" * 9000 + b"]" * 9000)),
    "deeper than a message may be": http(answer().replace(b'"ok"', b"[" * 100 + b"]" * 100)),
    "an id that no token has": http(answer(choice={"token_ids": [2**40, 1]})),
    "a place that no choice has": http(answer(choice={"index": 2**70})),
    "a place before the first": http(answer(choice={"index": -1})),
    "a choice that is missing": http(answer(choice={"index": 1})),
    "two choices in one place": http(answer(choices=[json.loads(answer())["choices"][0]] * 2)),
    "an answer without a body": b"HTTP/1.1 204 X\r\n\r\n",
    "a redirect": http(b"", 302, b"location: http://127.0.0.1:9/\r\n"),
    "a status that is none": http(b"x", 999),
    "less than it said": http(answer(), length=10**6),
    "another protocol": b"\x15\x03\x01\x00\x02\x02\x46",
    "a header without end": http(answer(), headers=b"x: " + b"a" * 300_000 + b"\r\n"),
}
ODD = {
    "a content in parts": http(answer({"role": "assistant", "content": [{"type": "text", "text": "ok"}]})),
    "a usage that is none": http(answer(usage={"prompt_tokens": -5, "completion_tokens": 10**30})),
    "ids without logprobs": http(answer(choice={"logprobs": None})),
}
STREAMED = {
    "no JSON": stream(b"{nope"),
    "not UTF-8": stream(delta(content="ok").replace(b'"ok"', b'"\xff"')),
    "a number for a text": stream(delta(content=5)),
    "a list for a thought": stream(delta(reasoning=[])[:-3] + b'"reasoning": [1]}}]}'),
    "a text for a place": stream(delta(tool_calls=[{"index": "a", "function": {"name": "x"}}, {"index": 0}])),
    "an object for arguments": stream(
        delta(tool_calls=[{"index": 0, "function": {"name": "x", "arguments": {"a": 1}}}])
    ),
    "a number for an id": stream(delta(tool_calls=[{"index": 0, "id": 5, "function": {"name": "x"}}])),
    "a place that no choice has": stream(delta(content="ok").replace(b'"index": 0', b'"index": %d' % 2**70)),
    "a text for a usage": stream(delta(content="ok"), json.dumps({"choices": [], "usage": "x"}).encode()),
    "a text for a count": stream(delta(content="ok"), b'{"choices": [], "usage": {"prompt_tokens": "x"}}'),
    "a page": http(b"<html></html>"),
    "an answer without a body": b"HTTP/1.1 204 X\r\n\r\n",
}


def newest(proxy: Proxy) -> CallState:
    return proxy.last_call().state


@pytest.mark.parametrize("case", WHOLE)
def test_a_malformed_answer_is_an_upstream_error_in_every_dialect(
    proxy: Proxy, upstream: RawUpstream, case: str
) -> None:
    upstream.answer = WHOLE[case]
    for path, body in CALLS.items():
        got = proxy.http.post(path, json={"model": "agent", **body})
        assert (got.status_code, "error" in got.json()) == (502, True), path
    assert newest(proxy) is CallState.FAILED


@pytest.mark.parametrize("case", ODD)
def test_an_unusual_but_valid_answer_is_passed_on_and_recorded(proxy: Proxy, upstream: RawUpstream, case: str) -> None:
    upstream.answer = ODD[case]
    for path, body in CALLS.items():
        got = proxy.http.post(path, json={"model": "agent", **body})
        assert (got.status_code, "ok" in got.text) == (200, True), path
    assert newest(proxy) is CallState.ANSWERED


@pytest.mark.parametrize("usage", ["x", {"prompt_tokens": "x"}, {"prompt_tokens_details": [1]}])
def test_a_usage_that_cannot_be_rendered_is_an_upstream_error(
    proxy: Proxy, upstream: RawUpstream, usage: object
) -> None:
    upstream.answer = http(answer(usage=usage))
    statuses = [proxy.http.post(path, json={"model": "agent", **body}).status_code for path, body in CALLS.items()]
    assert statuses == [200, 502, 502]  # Chat Completions passes it on unchanged
    assert newest(proxy) is CallState.FAILED


@pytest.mark.parametrize("indexes", [(1,), (0, 2)])
def test_a_stream_without_one_of_its_choices_is_an_upstream_error_in_every_dialect(
    upstream: RawUpstream, store: Store, store_file: Path, tmp_path: Path, indexes: tuple[int, ...]
) -> None:
    upstream.answer = stream(*[delta(content="ok").replace(b'"index": 0', b'"index": %d' % at) for at in indexes])
    with running(upstream.url, store, tmp_path) as own:
        for path, body in CALLS.items():
            got = own.http.post(path, json={"model": "agent", "stream": True, **body})
            assert f"its choices are numbered {list(indexes)}" in got.text, path
            assert newest(own) is CallState.FAILED
    assert verify(str(store_file)).findings == []


def test_an_error_event_says_why_choices_are_missing(
    upstream: RawUpstream, store: Store, store_file: Path, tmp_path: Path
) -> None:
    error = b'{"error":{"message":"engine died","code":503,"type":"x"}}'
    upstream.answer = stream(delta(content="ok").replace(b'"index": 0', b'"index": 1'), error)
    with running(upstream.url, store, tmp_path) as own:
        for path, body in CALLS.items():
            got = own.http.post(path, json={"model": "agent", "stream": True, **body})
            assert ("engine died" in got.text, "numbered" in got.text) == (True, False), path
            assert newest(own) is CallState.FAILED
    assert verify(str(store_file)).findings == []


@pytest.mark.parametrize("case", STREAMED)
def test_a_malformed_stream_ends_and_is_recorded(proxy: Proxy, upstream: RawUpstream, case: str) -> None:
    upstream.answer = STREAMED[case]
    for path, body in CALLS.items():
        got = proxy.http.post(path, json={"model": "agent", "stream": True, **body})
        assert got.status_code in (200, 502), path
        if path != "/v1/chat/completions":  # its chunks are passed on unchanged
            assert '"error"' in got.text, path
    assert newest(proxy) is not CallState.STARTED


REFUSAL = "I cannot help."
HEAD: dict[str, Any] = {"id": "x", "created": 1, "model": "base"}


def answers(upstream: RawUpstream, streamed: bool, finish: str, **message: str) -> None:
    """Let the upstream answer with a message, in two pieces if streamed."""
    if not streamed:
        whole = {"index": 0, "message": {"role": "assistant", "content": None} | message, "finish_reason": finish}
        upstream.answer = http(json.dumps({**HEAD, "object": "chat.completion", "choices": [whole]}).encode())
        return
    ((name, text),) = message.items()
    deltas = [{"role": "assistant", name: text[:3]}, {name: text[3:]}, {}]
    chunks = [
        {"index": 0, "delta": delta, "finish_reason": None if delta else finish} for delta in deltas
    ]  # fmt: skip
    upstream.answer = stream(
        *(json.dumps({**HEAD, "object": "chat.completion.chunk", "choices": [chunk]}).encode() for chunk in chunks)
    )


def responses(proxy: Proxy, streamed: bool) -> tuple[Any, list[Any]]:
    """Return the response, and the events of the stream."""
    if not streamed:
        return proxy.agent().responses.create(model="agent", input="hi"), []
    events: list[Any] = list(proxy.agent().responses.create(model="agent", input="hi", stream=True))
    return events[-1].response, events


def messages(proxy: Proxy, streamed: bool) -> Any:
    with anthropic.Anthropic(
        base_url=proxy.url, api_key="k", max_retries=0, timeout=60, _strict_response_validation=True
    ) as client:
        request: Any = {"model": "agent", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
        if not streamed:
            return client.messages.create(**request)
        with client.messages.stream(**request) as events:
            return events.get_final_message()


def recorded(proxy: Proxy) -> Any:
    """Return the message of the last call in the store."""
    return proxy.store.trajectories.read(proxy.last_call().trajectory_id).messages[-1]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_refusal_is_a_part_of_its_own_and_recorded(proxy: Proxy, upstream: RawUpstream, streamed: bool) -> None:
    answers(upstream, streamed, "stop", refusal=REFUSAL)
    response, events = responses(proxy, streamed)
    ((part,),) = [item.content for item in response.output]
    assert (response.status, part.type, part.refusal) == ("completed", "refusal", REFUSAL)
    kinds = [event.type for event in events if "refusal" in event.type]
    assert kinds == (["response.refusal.delta"] * 2 + ["response.refusal.done"]) * streamed
    assert recorded(proxy)["refusal"] == REFUSAL
    answer = messages(proxy, streamed)
    assert (answer.stop_reason, [block.text for block in answer.content]) == ("refusal", [REFUSAL])


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_that_a_filter_ended_is_not_complete(proxy: Proxy, upstream: RawUpstream, streamed: bool) -> None:
    answers(upstream, streamed, "content_filter", content="The first")
    response, _ = responses(proxy, streamed)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "content_filter")
    assert (response.output_text, response.output[0].status) == ("The first", "incomplete")
    assert messages(proxy, streamed).stop_reason == "refusal"


SILENT = "#say=hello.world #delay=1.5"
BODIES: dict[str, Any] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": SILENT}]},
    "/v1/completions": {"prompt": SILENT},
    "/v1/responses": {"input": SILENT},
    "/v1/messages": {"messages": [{"role": "user", "content": SILENT}], "max_tokens": 90},
}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["agent", "judge"])
@pytest.mark.parametrize("path", BODIES)
def test_a_silent_stream_is_ended_and_the_setting_named(
    start: Start, vllm: ScriptedVllm, vllm_url: str, path: str, model: str
) -> None:
    hosted = entry(vllm_url + "/v1", "hosted_vllm/tiny-base", key=None)
    proxy = start(stream_idle_timeout_seconds=0.3, model_list=(hosted,))
    answer = call(proxy, model, path, stream=True, **BODIES[path])
    assert answer.status_code == 200
    assert re.search(r"0\.3 s.*stream_idle_timeout_seconds", answer.text)
    proxy.settled()
    (recorded,) = proxy.store.calls.page()
    assert (recorded.state, recorded.alias) == (CallState.FAILED, model)
    eventually(lambda: vllm.aborted)
