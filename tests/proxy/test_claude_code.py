"""/v1/messages as Claude Code sends it: attribution, session ids, thinking, tool search."""

from __future__ import annotations

from typing import Any

import pytest

from ratchet.store.records import Call
from ratchet.trainer.rows.build_rows import why_untrainable
from tests.harness.proxy.running_proxy import Proxy
from tests.harness.proxy.scripted_vllm import ScriptedVllm, render

USER: Any = {"role": "user", "content": "#say=hello"}
PATHS = ["/v1/messages", "/v1/messages/count_tokens"]


def attribution(digest: str) -> Any:
    return {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.4; cch={digest};"}


def ask(proxy: Proxy, path: str = "/v1/messages", headers: Any = None, **more: Any) -> Any:
    body = {"model": "agent", "max_tokens": 4096, "messages": [USER], **more}
    return proxy.http.post(path, json=body, headers=headers)


def calls(proxy: Proxy) -> list[Call]:
    proxy.settled()
    return list(proxy.store.calls.page(9))[::-1]


@pytest.mark.parametrize("path", PATHS)
def test_the_attribution_which_is_another_one_in_every_request_is_left_out(
    proxy: Proxy, vllm: ScriptedVllm, path: str
) -> None:
    prompt = {"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}
    later = [{"role": "system", "content": attribution("c")["text"]}, {"role": "system", "content": [attribution("d")]}]
    for digest in ("a", "b"):
        answer = ask(proxy, path, system=[attribution(digest), prompt], messages=[USER, *later])
        assert vllm.calls[-1]["messages"] == [{"role": "system", "content": "be brief"}, USER]
    if path == PATHS[1]:
        assert answer.json()["input_tokens"] == len(render(vllm.calls[-1]["messages"]))
    assert ask(proxy, path, system=[attribution("a")]).status_code == 200
    assert vllm.calls[-1]["messages"] == [USER]


def test_attempts_at_one_task_have_one_root_and_later_calls_are_exact(proxy: Proxy) -> None:
    for attempt in range(2):
        history = [USER]
        for turn in range(3):
            answer = ask(proxy, system=[attribution(f"{attempt}{turn}")], messages=history).json()
            history += [
                {"role": "assistant", "content": answer["content"]},
                {"role": "user", "content": f"#say={turn}"},
            ]
    made = calls(proxy)
    assert [call.linked_by for call in made] == ["root", "graph", "graph"] * 2
    assert [call.context for call in made] == ["root", "exact", "exact"] * 2
    assert made[0].prompt_node == made[3].prompt_node


def test_a_session_of_claude_code_is_one_trajectory(proxy: Proxy) -> None:
    session = {"x-claude-code-session-id": "8d1f0bd2-9c3a-4c55-8f53-2f5f27ac1b7e"}
    for text in ("#say=title", "#say=quota", "#say=answer"):
        answer = ask(proxy, headers=session, messages=[{"role": "user", "content": text}])
        assert answer.headers["x-ratchet-trajectory"] == session["x-claude-code-session-id"]
    assert {call.linked_by for call in calls(proxy)} == {"header"}


@pytest.mark.parametrize(
    ("thinking", "sent"),
    [
        ({"type": "enabled", "budget_tokens": 2048}, {"thinking_token_budget": 2048}),
        ({"type": "disabled"}, {"reasoning_effort": "none"}),
        ({"type": "adaptive"}, {"reasoning_effort": "low"}),
        (None, {"reasoning_effort": "low"}),
    ],
)
def test_thinking_reaches_vllm_in_its_own_fields(
    proxy: Proxy, vllm: ScriptedVllm, thinking: Any, sent: dict[str, Any]
) -> None:
    more = {"thinking": thinking, "output_config": {"effort": "low"}, "chat_template_kwargs": {"mine": 1}}
    assert ask(proxy, **more).status_code == 200
    got = vllm.calls[-1]
    assert sent.items() <= got.items()
    assert ("thinking_token_budget" in got) == ("thinking_token_budget" in sent)
    assert got["chat_template_kwargs"]["mine"] == 1
    assert ask(proxy, PATHS[1], **more).status_code == 200
    effort = sent.get("reasoning_effort", "low")
    assert vllm.calls[-1]["chat_template_kwargs"] == {
        "enable_thinking": sent.get("reasoning_effort") != "none", "mine": 1, "reasoning_effort": effort,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("thinking", "param"),
    [
        ({"type": "enabled"}, "thinking.budget_tokens"),
        ({"type": "enabled", "budget_tokens": 1023}, "thinking.budget_tokens"),
        ({"type": "enabled", "budget_tokens": True}, "thinking.budget_tokens"),
        ({"type": "enabled", "budget_tokens": 4096}, "thinking.budget_tokens"),
        ({"type": "always"}, "thinking.type"),
    ],
)
def test_thinking_that_vllm_refuses_is_refused_by_its_name(
    proxy: Proxy, vllm: ScriptedVllm, thinking: Any, param: str
) -> None:
    refused = ask(proxy, thinking=thinking)
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
    assert refused.json()["error"]["message"].startswith(param)
    assert vllm.calls == []


def test_an_answer_whose_thought_may_have_been_cut_at_its_budget_is_constrained(proxy: Proxy) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    ask(proxy, thinking=thinking, messages=[{"role": "user", "content": "#tokens=1100"}])
    ask(proxy, thinking=thinking)
    cut, short = calls(proxy)
    assert cut.sampling["thinking_token_budget"] == 1024
    assert [why_untrainable(call, call.choices[0]) for call in (cut, short)] == ["constrained_sampling", None]


@pytest.mark.parametrize("path", PATHS)
def test_tools_that_a_tool_search_found_are_text_in_its_result(proxy: Proxy, vllm: ScriptedVllm, path: str) -> None:
    found = [{"type": "tool_reference", "tool_name": name} for name in ("send", "read")]
    history = [
        USER,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "ToolSearch", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": found}, found[0]]},
    ]
    assert ask(proxy, path, messages=history).status_code == 200
    result = {"role": "tool", "tool_call_id": "t1", "content": "tool_reference: send\ntool_reference: read"}
    assert vllm.calls[-1]["messages"][2:] == [result]


def test_tools_that_a_system_message_adds_or_removes_are_added_or_removed(proxy: Proxy, vllm: ScriptedVllm) -> None:
    schema = {"type": "object"}
    tools = [{"name": name, "input_schema": schema, "defer_loading": name != "bash"} for name in ("bash", "a", "b")]

    def change(kind: str, **tool: Any) -> Any:
        return {"type": kind, "tool": tool}

    changes = [
        change("tool_addition", type="tool_reference", name="a"),
        change("tool_removal", type="tool_reference", name="bash"),
        change("tool_addition", type="tool_definition", definition={"name": "c", "input_schema": schema}),
    ]
    answer = ask(proxy, tools=tools, messages=[USER, {"role": "system", "content": changes}])
    assert answer.status_code == 200
    assert vllm.calls[-1]["messages"] == [USER]
    offered = {tool["function"]["name"]: tool["function"].get("defer_loading") for tool in vllm.calls[-1]["tools"]}
    assert offered == {"a": None, "b": True, "c": None}
    unknown = [{"role": "system", "content": [change("tool_removal", type="tool_reference", name="x")]}]
    refused = ask(proxy, tools=tools, messages=[USER, *unknown])
    assert (refused.status_code, "'x'" in refused.json()["error"]["message"]) == (400, True)
