"""Texts in several parts reach vLLM as in its own API: its template puts a line break between those of a user."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.proxy.running_proxy import Proxy
from tests.harness.proxy.scripted_vllm import ScriptedVllm

PARTS = [{"type": "text", "text": "one."}, {"type": "text", "text": "#say=two"}]
INPUT = [{**part, "type": "input_text"} for part in PARTS]
OUTPUT = [{**part, "type": "output_text", "annotations": []} for part in PARTS]


def sent(proxy: Proxy, vllm: ScriptedVllm, path: str, body: Any) -> list[Any]:
    """Return the messages that vLLM gets, without their other fields."""
    assert proxy.http.post(path, json={"model": "agent", **body}).status_code == 200
    return [message["content"] for message in vllm.calls[-1]["messages"]]


def test_the_parts_of_a_message_are_passed_on(proxy: Proxy, vllm: ScriptedVllm) -> None:
    called = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    found = {"type": "tool_result", "tool_use_id": "c1", "content": PARTS}
    messages: Any = [
        {"role": "user", "content": PARTS},
        {"role": "assistant", "content": [*PARTS, called]},
        {"role": "user", "content": [found]},
        {"role": "user", "content": PARTS[:1]},
    ]
    body = {"max_tokens": 9, "system": PARTS, "messages": messages}
    assert sent(proxy, vllm, "/v1/messages", body) == [
        "one.#say=two", PARTS, "one.#say=two", "one.\n#say=two", "one.",
    ]  # fmt: skip
    failed = [{"role": "user", "content": [{**found, "is_error": True}]}]
    body["messages"] = [*messages[:2], *failed]
    assert sent(proxy, vllm, "/v1/messages", body)[-1] == "Error: one.\n#say=two"


def test_the_parts_of_an_item_are_passed_on(proxy: Proxy, vllm: ScriptedVllm) -> None:
    items: Any = [
        {"role": "developer", "content": INPUT},
        {"role": "user", "content": INPUT},
        {"type": "message", "role": "assistant", "content": OUTPUT},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": INPUT},
        {"role": "user", "content": INPUT[:1]},
    ]
    assert sent(proxy, vllm, "/v1/responses", {"input": items}) == [
        "one.\n#say=two", PARTS, "one.#say=two", "one.\n#say=two", "one.",
    ]  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_messages_without_any_content_are_refused(proxy: Proxy, path: str) -> None:
    body = {"model": "agent", "max_tokens": 9, "messages": [{"role": "user", "content": []}]}
    refused = proxy.http.post(path, json=body)
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
    assert "none of them has content" in refused.json()["error"]["message"]
