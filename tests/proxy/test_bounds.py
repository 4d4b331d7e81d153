"""Settings bound a request's JSON, and a refusal names the setting."""

from __future__ import annotations

from typing import Any

import pytest

from ratchet.proxy.errors import BodyTooLarge
from ratchet.proxy.wire.body_bounds import BodyBounds
from ratchet.store.content import json_depth
from ratchet.store.content.messages import link_key
from tests.harness.proxy.running_proxy import Start
from tests.harness.proxy.scripted_vllm import ScriptedVllm

USER: Any = {"role": "user", "content": "hi"}
BOUNDS = BodyBounds(body=10**6, max_messages=40, max_tools=20, max_json_depth=10, max_json_values=2000)


def deep(levels: int) -> Any:
    value: Any = "end"
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("text", "depth"),
    [
        ('{"a":[[1],[2,{"b":[]}]]}', 5),
        ('{"a":"[[[[","b":"\\"[[[["}', 1),
        ('["\\\\",[[]]]', 3),
        ('"[["', 0),
    ],
)
def test_depth_is_counted_outside_of_strings(text: str, depth: int) -> None:
    assert json_depth.depth(json_depth.strip_strings(text.encode())) == depth


def test_brackets_inside_strings_do_not_count() -> None:
    BOUNDS.check(b'{"messages":[{"role":"user","content":"' + b"[{," * 5000 + b'"}]}')


@pytest.mark.parametrize("shape", [b'{"x":[%s]}', b'{"messages":[],"x":[%s]}', b'{"x":"\\\\","y":{"a":[[],%s]}}'])
@pytest.mark.parametrize("value", [b"[]", b"{}", b'{"a":1}', b'"a"', b'"\\""', b"[1]", b"null", b'1,"a"'])
def test_very_many_values_are_refused_before_they_are_parsed(shape: bytes, value: bytes) -> None:
    BOUNDS.check(shape % b",".join([value] * 900))
    with pytest.raises(BodyTooLarge, match="max_json_values"):
        BOUNDS.check(shape % b",".join([value] * 4100))


@pytest.mark.parametrize("number", [b"123456", b"-1.5e+3", b" 7"])
def test_numbers_of_a_list_count_as_a_tenth(number: bytes) -> None:
    BOUNDS.check(b'{"prompt":[[%s]]}' % b",".join([number] * 19_000))
    with pytest.raises(BodyTooLarge, match="max_json_values"):
        BOUNDS.check(b'{"prompt":[[%s]]}' % b",".join([number] * 21_000))


@pytest.mark.parametrize("body", [b"", b"]" * 50, b'{"messages":' + b"[" * 9, b"]]]]{{{{" * 9, b'"' + b"[" * 50])
def test_invalid_json_is_left_to_the_parser(body: bytes) -> None:
    BOUNDS.check(body)


ROUTES: dict[str, Any] = {
    "/v1/chat/completions": {"model": "agent", "messages": [USER]},
    "/v1/completions": {"model": "agent", "prompt": "x"},
    "/v1/responses": {"model": "agent", "input": [USER]},
    "/v1/messages": {"model": "agent", "max_tokens": 5, "messages": [USER]},
    "/v1/messages/count_tokens": {"model": "agent", "messages": [USER]},
    "/v1/embeddings": {"model": "agent", "input": "x"},
}


@pytest.mark.parametrize("path", ROUTES)
def test_json_that_is_too_deep_is_refused_in_every_dialect_by_the_settings_name(
    start: Start, vllm: ScriptedVllm, path: str
) -> None:
    proxy = start(max_json_depth=20)
    for name in ("tools", "metadata", "stop", "unknown"):
        answer = proxy.http.post(path, json={**ROUTES[path], name: deep(30)})
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
        assert "31 levels of JSON" in error["message"]
        assert "at most 20" in error["message"]
        assert "max_json_depth" in error["message"]
        assert (answer.json().get("type") == "error") == path.startswith("/v1/messages")
    assert vllm.calls == []


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("setting", ["max_messages", "max_tools"])
def test_too_many_messages_or_tools_are_refused_by_the_settings_name(start: Start, path: str, setting: str) -> None:
    proxy = start(**{setting: 3})
    name = "tools" if setting == "max_tools" else "input" if "responses" in path else "messages"
    answer = proxy.http.post(path, json={**ROUTES[path], name: [USER] * 4})
    assert answer.status_code == 400
    assert setting in answer.json()["error"]["message"]
    assert "4" in answer.json()["error"]["message"]
    if name != "tools":
        assert proxy.http.post(path, json={**ROUTES[path], name: [USER] * 3}).status_code == 200


def test_a_conversation_of_responses_is_bounded_as_a_whole(start: Start) -> None:
    proxy = start(max_messages=3)
    first = proxy.http.post("/v1/responses", json=ROUTES["/v1/responses"]).json()["id"]
    follow = {"model": "agent", "input": "more", "previous_response_id": first}
    second = proxy.http.post("/v1/responses", json=follow)
    assert second.status_code == 200
    third = proxy.http.post("/v1/responses", json={**follow, "previous_response_id": second.json()["id"]})
    assert third.status_code == 400
    assert "max_messages" in third.json()["error"]["message"]


@pytest.mark.parametrize("extra", [{"max_tokens": 10**30}, {"logit_bias": {"5": -(10**25)}}, {"seed": 2**64}])
def test_a_call_with_a_number_over_64_bits_is_recorded(start: Start, extra: Any) -> None:
    proxy = start(tokens_per_minute=10**6)
    call = proxy.http.post("/v1/chat/completions", json={**ROUTES["/v1/chat/completions"], **extra})
    assert call.status_code == 200
    proxy.settled()
    found = proxy.store.calls.read(call.headers["x-ratchet-call"])
    assert found.sampling == dict.fromkeys(extra, True)


def test_arguments_that_are_too_deep_are_compared_as_text() -> None:
    def called(arguments: str) -> Any:
        return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}

    assert link_key("", called('{"a":1,"b":[2]}')) == link_key("", called('{"b": [2], "a": 1}'))
    for levels in (150, 5000):
        text = "[" * levels + "]" * levels
        assert link_key("", called(text)) == link_key("", called(text + " "))
        assert link_key("", called(text)) != link_key("", called("[" + text + "]"))
