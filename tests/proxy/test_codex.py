"""/v1/responses as Codex sends it: zstd bodies, and histories with items of other tools and of OpenAI's servers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from backports import zstd

from tests.harness.proxy.running_proxy import Proxy
from tests.harness.proxy.scripted_vllm import ScriptedVllm

USER: Any = {"role": "user", "content": "#say=hello"}
ACTION = {"type": "exec", "command": ["ls", "-l"], "env": {}}


def called(name: str, arguments: Any) -> Any:
    return {
        "id": "c1", "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments, separators=(",", ":"))},
    }  # fmt: skip


def test_a_body_compressed_with_zstd_is_read_and_recorded(proxy: Proxy) -> None:
    body = zstd.compress(json.dumps({"model": "agent", "input": [USER]}).encode())
    headers = {"content-type": "application/json", "content-encoding": "zstd"}
    answer = proxy.http.post("/v1/responses", content=body, headers=headers)
    assert answer.json()["output"][0]["content"][0]["text"] == "hello"
    assert proxy.last_call().untrainable is None


@pytest.mark.parametrize(
    ("items", "sent"),
    [
        (
            [
                {"type": "local_shell_call", "id": "ls_1", "call_id": "c1", "status": "completed", "action": ACTION},
                {"type": "function_call_output", "call_id": "c1", "output": "total 0"},
            ],
            [
                {"role": "assistant", "content": None, "tool_calls": [called("local_shell", ACTION)]},
                {"role": "tool", "tool_call_id": "c1", "content": "total 0"},
            ],
        ),
        (
            [
                {"type": "shell_call", "call_id": "c1", "action": {"commands": ["ls"]}},
                {"type": "shell_call_output", "call_id": "c1", "output": [{"stdout": "a"}]},
            ],
            [
                {"role": "assistant", "content": None, "tool_calls": [called("shell", {"commands": ["ls"]})]},
                {"role": "tool", "tool_call_id": "c1", "content": '[{"stdout":"a"}]'},
            ],
        ),
        (
            [
                {"type": "apply_patch_call", "call_id": "c1", "operation": {"type": "delete_file", "path": "a"}},
                {"type": "apply_patch_call_output", "call_id": "c1", "status": "completed"},
            ],
            [
                {
                    "role": "assistant", "content": None,
                    "tool_calls": [called("apply_patch", {"type": "delete_file", "path": "a"})],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "completed"},
            ],
        ),
        (
            [
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
                {
                    "type": "web_search_call", "id": "ws_1", "status": "completed",
                    "action": {"type": "search", "query": "rain"},
                },
                {"role": "assistant", "content": "it rains"},
            ],
            [
                {
                    "role": "assistant", "reasoning": "hm",
                    "content": '[web_search_call: {"action":{"type":"search","query":"rain"}}]\nit rains',
                }
            ],
        ),
        (
            [{"type": "compaction", "id": "cmp_1", "encrypted_content": "gAAAA"}],
            [{"role": "assistant", "content": "[compaction, left out]\n"}],
        ),
        (
            [{"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": "iVBOR"}],
            [{"role": "assistant", "content": "[image_generation_call, left out]\n"}],
        ),
        ([{"type": "ghost_snapshot", "ghost_commit": {"id": "a1"}}], []),
    ],
)  # fmt: skip
def test_an_item_that_vllm_cannot_read_does_not_end_the_session(
    proxy: Proxy, vllm: ScriptedVllm, items: Any, sent: Any
) -> None:
    history = [USER, *items, USER]
    linked = []
    for _ in range(2):
        answer = proxy.http.post("/v1/responses", json={"model": "agent", "input": history})
        assert answer.status_code == 200
        linked.append(vllm.calls[-1]["messages"])
        history += [*answer.json()["output"], USER]
    assert linked[0] == [USER, *sent, USER]
    assert linked[1][: len(linked[0])] == linked[0]
    proxy.settled()
    assert [call.context for call in proxy.store.calls.page(2)] == ["exact", "root"]


def test_an_item_that_no_history_has_is_refused_by_its_type(proxy: Proxy) -> None:
    for kind in ("compaction_trigger", "nothing"):
        refused = proxy.http.post("/v1/responses", json={"model": "agent", "input": [USER, {"type": kind}]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
        assert kind in refused.json()["error"]["message"]


@pytest.mark.parametrize("strict", [None, True])
def test_the_format_of_the_text_is_echoed_with_all_of_its_fields(proxy: Proxy, strict: bool | None) -> None:
    schema = {"type": "object", "properties": {}}
    given = {"type": "json_schema", "name": "s", "schema": schema} | ({"strict": strict} if strict else {})
    for text, echoed in (
        ({"format": given}, {"format": {**given, "description": None, "strict": bool(strict)}}),
        ({"format": {"type": "json_object"}}, {"format": {"type": "json_object"}}),
        ({"verbosity": "low"}, {"format": {"type": "text"}, "verbosity": "low"}),
        (None, {"format": {"type": "text"}}),
    ):
        body = {"model": "agent", "input": "#say=hi", "text": text}
        assert proxy.http.post("/v1/responses", json=body).json()["text"] == echoed
