"""An answer is whole by what the engine said of it, in every dialect, streamed or not, never by the status.

vLLM is read strictly. Servers of `model_list` are read as OpenAI-compatible servers are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from ratchet.store.records import Call
from ratchet.store.states import CallState
from ratchet.store.store import open_store
from ratchet.trainer.rows.build_rows import why_untrainable
from tests.harness.proxy.raw_upstream import RawUpstream, http, stream
from tests.harness.proxy.running_proxy import Proxy, running

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
DIALECTS = (CHAT, TEXT, RESPONSES, MESSAGES)
Json = dict[str, Any]


def request(path: str, text: str = "hi", **fields: Any) -> Json:
    body: Json = {"model": "agent"}
    if path == TEXT:
        return body | {"prompt": text} | fields
    if path == RESPONSES:
        return body | {"input": text} | fields
    return body | {"max_tokens": 9, "messages": [{"role": "user", "content": text}]} | fields


def choice(path: str, text: str | None, finish: str | None = None, logprob: float | None = -0.1, **fields: Any) -> Json:
    """Return a streamed choice; one token a letter, none for an empty text."""
    ids = list((text or "").encode())
    one: Json = {"index": 0, "finish_reason": finish, "token_ids": ids}
    if path == TEXT:
        one |= {"text": text or "", "logprobs": {"token_logprobs": [logprob] * len(ids)}}
    else:
        delta = {} if text is None else {"role": "assistant", "content": text}
        one |= {"delta": delta, "logprobs": {"content": [{"token": "x", "logprob": logprob}] * len(ids)}}
    return one | fields


def chunk(*choices: Json, **fields: Any) -> bytes:
    head = {"id": "x", "object": "chunk", "created": 1, "model": "base", "prompt_token_ids": [1, 2]}
    return json.dumps(head | {"choices": choices} | fields).encode()


def whole(path: str, text: str = "abc", finish: str | None = "stop", **fields: Any) -> bytes:
    one = choice(path, text, finish, **fields)
    if path != TEXT:
        one["message"] = {"role": "assistant", "content": text}
        del one["delta"]
    return chunk(one)


def usage(prompt: int, completion: int) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return chunk(usage=counts)


def unfinished(*events: bytes) -> bytes:
    """Return a stream that ends without [DONE]."""
    return stream(*events).removesuffix(b"data: [DONE]\n\n")


ERROR = b'{"error":{"message":"engine died","type":"InternalServerError","code":%d}}'
# What an engine sends when it does not complete an answer.
CUTS: dict[str, Callable[[str], bytes]] = {
    "the stream ends": lambda path: unfinished(chunk(choice(path, "abc"))),
    "the stream ends after a finish reason": lambda path: unfinished(chunk(choice(path, "abc", "stop"))),
    "an error event": lambda path: stream(chunk(choice(path, "abc")), ERROR % 500),
    "an error event of the request": lambda path: stream(chunk(choice(path, "abc")), ERROR % 400),
    "an error event as the first event": lambda path: stream(ERROR % 503),
    "no finish reason": lambda path: stream(chunk(choice(path, "abc"))),
    "abort": lambda path: stream(chunk(choice(path, "abc", "abort"))),
    "one of two choices is aborted": lambda path: stream(
        chunk(choice(path, "abc", "stop")), chunk(choice(path, "ab", "abort", index=1))
    ),
    "whole: no finish reason": lambda path: http(whole(path, finish=None)),
    "whole: abort": lambda path: http(whole(path, finish="abort")),
    "whole: an error with status 200": lambda path: http(ERROR % 503),
    "whole: less than it said": lambda path: http(whole(path), length=10**6),
}


@pytest.fixture(scope="module")
def proxy(upstream: RawUpstream, migrated: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    folder = tmp_path_factory.mktemp("proxy")
    store = open_store(str(folder / "store.db"))
    params = {"model": "openai/base", "api_base": f"{upstream.url}/v1"}
    other: Json = {"model_list": [{"model_name": "judge", "litellm_params": params}]}
    with running(upstream.url, store, folder, breaker_failure_threshold=10**6, **other) as one:
        yield one
    store.close()


def post(
    proxy: Proxy, paths: Sequence[str] = DIALECTS, text: str = "hi", **fields: Any
) -> dict[str, tuple[httpx.Response, Call]]:
    """Send a request in each dialect, each with a prompt of its own; return the answers and the recorded calls."""
    answers = {path: proxy.http.post(path, json=request(path, f"{path} {text}", **fields)) for path in paths}
    proxy.settled()
    return {path: (got, proxy.store.calls.read(got.headers["x-ratchet-call"])) for path, got in answers.items()}


def cut_off(proxy: Proxy, call: Call) -> bool:
    """Return whether the trajectory would be dropped as `cut_off`."""
    return proxy.store.trajectories.ended_by_failure([call.trajectory_id]) == {call.trajectory_id}


@pytest.mark.parametrize("case", CUTS)
def test_an_answer_that_the_engine_cut_is_cut_off_and_its_repetition_continues_the_attempt(
    proxy: Proxy, upstream: RawUpstream, case: str
) -> None:
    streamed = not case.startswith("whole")
    upstream.answer_to = lambda body: CUTS[case](dialect_of(body))
    first = post(proxy, text=case, stream=streamed)
    upstream.answer_to = None
    for path, (got, call) in first.items():
        assert (call.state, call.untrainable) == (CallState.FAILED, "failed"), path
        assert call.error, path
        assert cut_off(proxy, call), path
        assert_not_complete(path, got.text)
    for path, (_, call) in first.items():
        upstream.answer = http(whole(path))
        ((_, again),) = post(proxy, [path], text=case).values()
        assert (again.trajectory_id, again.linked_by) == (call.trajectory_id, "resend"), path
        assert not cut_off(proxy, call), path


def dialect_of(body: bytes) -> str:
    """Return the dialect whose inner call this is, as far as the answer's form depends on it."""
    return TEXT if b'"prompt"' in body else CHAT


def assert_not_complete(path: str, text: str) -> None:
    """No client of a translated dialect takes the answer for a whole one; those of vLLM's own see what vLLM sent."""
    if path in (RESPONSES, MESSAGES):
        assert '"error"' in text
        assert '"status":"completed"' not in text.replace(" ", "")[-200:]
        assert not any(word in text for word in ("response.completed", "end_turn", "message_stop"))
    else:
        assert '"error"' in text or '"abort"' in text


def test_a_reset_in_mid_stream_is_a_cut(proxy: Proxy, upstream: RawUpstream) -> None:
    upstream.resets, upstream.answer_to = True, lambda body: unfinished(chunk(choice(dialect_of(body), "abc")))
    found = post(proxy, stream=True, text="reset")
    upstream.resets, upstream.answer_to = False, None
    for path, (_, call) in found.items():
        assert (call.state, call.status, cut_off(proxy, call)) == (CallState.FAILED, 200, True), path


def test_a_plain_503_after_a_keep_alive_comment_is_a_failure(start: Callable[..., Proxy]) -> None:
    own = start(keep_alive_seconds=0.05)
    first = post(own, text="#wait=0.3 #status=503", stream=True)
    for path, (got, call) in first.items():
        assert (got.status_code, call.status, call.state) == (200, 200, CallState.FAILED), path
        assert (call.error, "scripted failure" in got.text) == ("scripted failure", True), path
    for path, (_, call) in post(own, text="#wait=0.3 #status=503", stream=True).items():
        assert call.trajectory_id == first[path][1].trajectory_id


@pytest.mark.parametrize(("status", "state"), [(400, "refused"), (404, "refused"), (429, "failed"), (503, "failed")])
def test_a_request_that_would_be_refused_again_is_not_expected_again(
    proxy: Proxy, upstream: RawUpstream, status: int, state: str
) -> None:
    upstream.answer = http(b'{"error":{"message":"no","code":%d}}' % status, status)
    ((first, call),) = post(proxy, [CHAT], text=f"refused {status}").values()
    assert (first.status_code, str(call.state), call.untrainable) == (status, state, state)
    is_cut = cut_off(proxy, call)
    upstream.answer = http(whole(CHAT))
    ((_, again),) = post(proxy, [CHAT], text=f"refused {status}").values()
    assert (is_cut, again.trajectory_id == call.trajectory_id) == ((state == "failed"),) * 2


# What was sampled, and why it is not trained.
INCONSISTENT: dict[str, tuple[Callable[[str], tuple[bytes, ...]], str]] = {
    "fewer ids than usage says": (lambda path: (chunk(choice(path, "abc", "stop")), usage(2, 4)), "length_mismatch"),
    "fewer prompt ids than usage says": (
        lambda path: (chunk(choice(path, "abc", "stop")), usage(3, 3)),
        "length_mismatch",
    ),
    "a positive logprob": (lambda path: (chunk(choice(path, "abc", "stop", 0.25)),), "invalid_logprobs"),
}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("case", INCONSISTENT)
def test_an_inconsistent_answer_is_answered_and_not_trained_with_the_reason(
    proxy: Proxy, upstream: RawUpstream, case: str, streamed: bool
) -> None:
    events, reason = INCONSISTENT[case]

    def answer(body: bytes) -> bytes:
        path = dialect_of(body)
        if streamed:
            return stream(*events(path))
        counts = json.loads(events(path)[-1]).get("usage")
        complete = json.loads(whole(path, logprob=0.25 if "logprob" in case else -0.1))
        return http(json.dumps(complete | {"usage": counts}).encode())

    upstream.answer_to = answer
    found = post(proxy, stream=streamed)
    upstream.answer_to = None
    for path, (got, call) in found.items():
        assert (got.status_code, call.state, call.untrainable) == (200, CallState.ANSWERED, reason), path
        assert why_untrainable(call, call.choices[0]) == reason
        assert call.completion_tokens == (4 if case.startswith("fewer ids") else 3)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_logprob_that_is_no_number_lets_no_unrequested_field_through(
    proxy: Proxy, upstream: RawUpstream, path: str
) -> None:
    events = [chunk(choice(path, letter, logprob=None)) for letter in "abc"]
    upstream.answer = stream(*events, chunk(choice(path, "d", "stop")), usage(2, 4))
    ((got, call),) = post(proxy, [path], stream=True).values()
    chunks = [json.loads(line[6:]) for line in got.text.split("\n\n")[:-2]]
    assert {one["model"] for one in chunks} == {"agent@0"}
    for one in chunks:
        assert one["prompt_token_ids"] is None
        assert (one["choices"][0]["token_ids"], one["choices"][0]["logprobs"]) == (None, None)
    assert call.state is CallState.ANSWERED
    assert call.untrainable in ("invalid_logprobs", "length_mismatch")


def test_a_call_that_vllm_refuses_for_the_logprobs_that_the_proxy_adds_is_answered_without_them(
    proxy: Proxy, upstream: RawUpstream
) -> None:
    refusal = b'{"error":{"message":"Out of range float values are not JSON compliant: nan","code":400}}'
    sent: list[bytes] = []

    def answer(body: bytes) -> bytes:
        sent.append(body)
        return http(refusal, 400) if b"logprobs" in body else http(whole(dialect_of(body), logprobs=None))

    upstream.answer_to = answer
    found = post(proxy)
    assert len(sent) == 2 * len(DIALECTS)
    for got, call in found.values():
        assert (got.status_code, call.state, call.untrainable) == (200, CallState.ANSWERED, "no_logprobs")
    wanted = {path: post(proxy, [path], logprobs=1 if path == TEXT else True)[path] for path in (CHAT, TEXT)}
    upstream.answer_to = None
    assert [(got.status_code, str(call.state)) for got, call in wanted.values()] == [(400, "refused")] * 2
    assert len(sent) == 2 * len(DIALECTS) + 2


# --- what answers a stream or a call with something else ----------------------------------------------------------


@pytest.mark.parametrize("body", [b"<html>busy</html>", b'{"detail": "busy"}', b" \n[1]", whole(CHAT)])
def test_html_or_json_in_answer_to_a_stream_is_a_502_before_the_head(
    proxy: Proxy, upstream: RawUpstream, body: bytes
) -> None:
    upstream.answer = http(body)
    for path, (got, call) in post(proxy, stream=True).items():
        assert (got.status_code, got.headers["content-type"]) == (502, "application/json"), path
        assert call.state is CallState.FAILED


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("code", "status"), [(503, 503), ("429", 429), ("overloaded", 502), (None, 502)])
def test_an_error_object_with_status_200_keeps_its_message_and_code(
    proxy: Proxy, upstream: RawUpstream, streamed: bool, code: Any, status: int
) -> None:
    upstream.answer = http(json.dumps({"error": {"message": "overloaded", "code": code, "type": "x"}}).encode())
    for path, (got, call) in post(proxy, stream=streamed).items():
        assert (got.status_code, got.json()["error"]["message"]) == (status, "overloaded"), path
        assert path == MESSAGES or got.json()["error"]["code"] == code
        assert (call.state, call.status, call.error) == (CallState.FAILED, status, "overloaded")


# --- servers of model_list ----------------------------------------------------------------------------------------

BARE = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "base"}


def bare(*choices: Any, **fields: Any) -> bytes:
    return json.dumps(BARE | {"choices": choices} | fields).encode()


def part(text: str, **fields: Any) -> Json:
    return {"index": 0, "delta": {"content": text}, "finish_reason": None} | fields


LAST = {"index": 0, "delta": {}, "finish_reason": "stop"}
SHAPES: dict[str, bytes] = {
    "delta null": stream(bare(part("ab")), bare(part("c")), bare(LAST | {"delta": None})),
    "no delta": stream(bare(part("abc")), bare({"index": 0, "finish_reason": "stop"})),
    "choices null": stream(bare(part("abc")), json.dumps(BARE | {"choices": None}).encode(), bare(LAST)),
    "an event without choices": stream(json.dumps(BARE).encode(), bare(part("abc")), bare(LAST)),
    "no index": stream(bare({"delta": {"content": "abc"}}), bare({"delta": {}, "finish_reason": "stop"})),
    "error null": stream(bare(part("abc"), error=None), bare(LAST, error=None)),
    "no [DONE] after the finish reason": unfinished(bare(part("abc")), bare(LAST)),
    "no finish reason before [DONE]": stream(bare(part("abc"))),
}


CHATS = (CHAT, RESPONSES, MESSAGES)


@pytest.mark.parametrize("case", SHAPES)
def test_servers_of_model_list_are_read_leniently_and_vllm_strictly(
    proxy: Proxy, upstream: RawUpstream, case: str
) -> None:
    upstream.answer = SHAPES[case]
    ends = {CHAT: "data: [DONE]", RESPONSES: "response.completed", MESSAGES: "message_stop"}
    for path, (got, call) in post(proxy, CHATS, stream=True, model="judge").items():
        assert text_of(path, got.text) == "abc", path
        assert not any(line.startswith(('data: {"error"', "event: error")) for line in got.text.splitlines())
        assert ends[path] in got.text
        assert (call.state, call.untrainable) == (CallState.ANSWERED, "other_model")
    states = {path: call.state for path, (_, call) in post(proxy, CHATS, stream=True).items()}
    assert states == dict.fromkeys(CHATS, CallState.FAILED)


@pytest.mark.parametrize("fields", [{"error": None}, {}])
def test_an_answer_without_an_index_is_read_too(proxy: Proxy, upstream: RawUpstream, fields: Json) -> None:
    message = {"message": {"role": "assistant", "content": "abc"}, "finish_reason": "stop"}
    upstream.answer = http(bare(message, **fields))
    for path, (got, call) in post(proxy, CHATS, model="judge").items():
        assert (got.status_code, "abc" in got.text, call.state) == (200, True, CallState.ANSWERED), path


@pytest.mark.parametrize("answer", [unfinished(bare(part("abc"))), stream(bare(part("abc", finish_reason="abort")))])
def test_an_answer_that_another_server_cut_is_a_failure_too(proxy: Proxy, upstream: RawUpstream, answer: bytes) -> None:
    upstream.answer = answer
    for path, (got, call) in post(proxy, CHATS, stream=True, model="judge").items():
        assert call.state is CallState.FAILED
        assert_not_complete(path, got.text)


def text_of(path: str, events: str) -> str:
    """Return the text in a stream's deltas."""
    found = ""
    for line in events.splitlines():
        event = json.loads(line[6:]) if line.startswith("data: {") else {}
        if path == CHAT:
            found += "".join(one["delta"].get("content") or "" for one in event.get("choices", ()))
        elif event.get("type") == "response.output_text.delta":
            found += event["delta"]
        elif event.get("type") == "content_block_delta":
            found += event["delta"].get("text", "")
    return found
