"""Templates get what they can render: one system message at the beginning, and texts of several parts joined."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ratchet.store.content.messages import with_one_system_message
from ratchet.store.store import Store
from tests.harness.proxy.running_proxy import Proxy, running
from tests.harness.proxy.scripted_scale_out import ScriptedScaleOut
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import served
from tests.proxy.test_prompts import give


def message(role: str, content: Any) -> Any:
    return {"role": role, "content": content}


def parts(*texts: str) -> Any:
    return [{"type": "text", "text": text} for text in texts]


def reminder(text: str) -> str:
    return f"<system-reminder>\n{text}\n</system-reminder>"


HI, YES, ON = message("user", "#say=hi"), message("assistant", "hi"), message("user", "#say=on")
PICTURE = message("system", [{"type": "image_url", "image_url": {"url": "data:,"}}])


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ([message("system", "a"), HI], [message("system", "a"), HI]),
        ([message("system", parts("a", "b")), HI], [message("system", parts("a", "b")), HI]),
        ([message("developer", "a"), HI], [message("system", "a"), HI]),
        ([message("system", "a"), message("developer", parts("b", "c")), HI], [message("system", "a\n\nb\nc"), HI]),
        ([HI, message("developer", "b"), ON], [message("user", f"#say=hi\n\n{reminder('b')}"), ON]),
        (
            [message("system", "a"), HI, message("system", "b"), message("developer", "c"), YES, ON],
            [message("system", "a"), message("user", f"#say=hi\n\n{reminder('b')}\n\n{reminder('c')}"), YES, ON],
        ),
        ([HI, YES, message("system", "b"), ON], [HI, YES, message("user", reminder("b")), ON]),
        (
            [message("user", parts("#say=hi")), message("system", "b")],
            [message("user", [*parts("#say=hi"), *parts(reminder("b"))])],
        ),
        ([HI, message("system", ""), message("system", None), ON], [HI, ON]),
        ([HI, PICTURE, ON], [HI, PICTURE, ON]),
    ],
)
def test_leading_system_messages_are_merged_and_later_ones_are_reminders(given: Any, sent: Any) -> None:
    before = [message.copy() for message in given]
    assert with_one_system_message(given) == sent
    assert given == before


MIDDLE: dict[str, Any] = {  # in each dialect: instructions, two messages of the system, the user, the system again
    "/v1/chat/completions": {
        "messages": [message("system", "a"), message("developer", "b"), HI, message("developer", "c"), YES, ON]
    },
    "/v1/responses": {
        "instructions": "a", "input": [message("developer", "b"), HI, message("developer", "c"), YES, ON]
    },
    "/v1/messages": {
        "max_tokens": 99, "system": "a", "messages": [message("system", "b"), HI, message("system", "c"), YES, ON]
    },
}  # fmt: skip


@pytest.mark.parametrize("path", MIDDLE)
def test_vllm_gets_one_system_message_in_every_dialect(proxy: Proxy, vllm: ScriptedVllm, path: str) -> None:
    assert proxy.http.post(path, json={"model": "agent", **MIDDLE[path]}).status_code == 200
    question = message("user", f"#say=hi\n\n{reminder('c')}")
    assert vllm.calls[-1]["messages"] == [message("system", "a\n\nb"), question, YES, ON]


def test_a_chat_is_recorded_as_the_client_sent_it_and_its_later_calls_are_exact(
    proxy: Proxy, vllm: ScriptedVllm
) -> None:
    messages = [
        message("system", "a"),
        HI,
        message("developer", "b " * 9000),
    ]  # a long list is read from its known beginning
    for text in ("#say=on", "#say=more", "#say=last"):
        answer = proxy.http.post("/v1/chat/completions", json={"model": "agent", "messages": messages}).json()
        messages += [answer["choices"][0]["message"], message("system", "now"), message("user", text)]
    proxy.settled()
    made = proxy.store.calls.page(9)[::-1]
    assert [call.context for call in made] == ["root", "exact", "exact"]
    found = proxy.store.trajectories.read(made[0].trajectory_id).messages
    assert [message["role"] for message in found] == [
        "system", "user", "developer", "assistant", *["system", "user", "assistant"] * 2,
    ]  # fmt: skip
    sent = [message["role"] for message in vllm.calls[-1]["messages"]]
    assert sent == ["system", "user", "assistant", "user", "user", "assistant", "user", "user"]


def test_a_versions_prompt_replaces_the_first_message_and_keeps_what_follows_it(
    proxy: Proxy, vllm: ScriptedVllm
) -> None:
    give(proxy, "tuned")
    body = {"model": "agent", **MIDDLE["/v1/chat/completions"]}
    assert proxy.http.post("/v1/chat/completions", json=body).status_code == 200
    assert vllm.calls[-1]["messages"][0] == message("system", "tuned\n\nb")


@pytest.mark.parametrize("prompt", [None, "tuned"])
def test_answers_between_system_messages_are_spliced(store: Store, tmp_path: Path, prompt: str | None) -> None:
    with served(ScriptedScaleOut()) as url, running(url, store, tmp_path) as proxy:
        if prompt:
            give(proxy, prompt)
        messages = [message("system", "a"), message("developer", "b"), message("user", "#think=hm #tool=search #drift")]
        for text in ("#think=so #tool=search #drift", "#say=the.end", "#say=more"):
            body = {"model": "agent", "messages": messages}
            answer = proxy.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
            calls = answer.get("tool_calls") or []
            messages += [message("assistant", answer["content"]) | ({"tool_calls": calls} if calls else {})]
            messages += [message("tool", text) | {"tool_call_id": call["id"]} for call in calls]
            messages += [message("user", text), message("system", "now")]
        proxy.settled()
        made = sorted(store.calls.page(), key=lambda call: call.started_at)
        assert [call.context for call in made] == ["root", "exact", "exact"]
        assert 'ratchet_exact_splices_total{outcome="spliced"} 2.0' in proxy.http.get("/metrics").text


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
