"""Tool calls that vLLM constrains by a grammar are marked and not trained; all others are trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ratchet.proxy.settings import ProxySettings
from ratchet.store.records import Call
from ratchet.trainer.rows.build_rows import why_untrainable
from tests.harness.proxy.running_proxy import Proxy, Start

USER: Any = [{"role": "user", "content": "hi"}]
HELD = "constrained_tool_calls"


def tool(strict: Any = None) -> dict[str, Any]:
    given = {} if strict is None else {"strict": strict}
    return {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, **given}}


def flat(strict: Any = None) -> dict[str, Any]:
    return {"type": "function", **tool(strict)["function"]}


def recorded(proxy: Proxy, body: dict[str, Any], path: str = "/v1/chat/completions") -> Call:
    answer = proxy.http.post(path, json={"model": "agent", **body})
    assert answer.status_code == 200, answer.text
    proxy.settled()
    return proxy.store.calls.page(1)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tools": [tool()]}, None),
        ({"tools": [tool(False)]}, None),
        ({"tools": [tool(), tool(True)]}, HELD),
        ({"tools": [tool("true")]}, HELD),
        ({"tools": [tool(True)], "tool_choice": "auto"}, HELD),
        ({"tools": [tool(True)], "tool_choice": "none"}, None),
        ({"tools": [tool(True)], "tool_choice": "required"}, "constrained_sampling"),
        ({"tools": [tool()], "parallel_tool_calls": False}, HELD),
        ({"tools": [tool()], "parallel_tool_calls": 0}, HELD),
        ({"tools": [tool()], "parallel_tool_calls": True}, None),
        ({"parallel_tool_calls": False}, None),
    ],
)
def test_calls_that_vllm_constrains_by_default_are_not_trained(
    proxy: Proxy, fields: dict[str, Any], reason: str | None
) -> None:
    call = recorded(proxy, {"messages": USER, **fields})
    assert why_untrainable(call, call.choices[0]) == reason
    assert call.sampling.get("parallel_tool_calls") == fields.get("parallel_tool_calls")
    if reason == HELD:
        assert why_untrainable(call, call.choices[0], imitated=True) is None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "hi", "tools": [flat(True)]}),
        ("/v1/responses", {"input": "hi", "tools": [flat()], "parallel_tool_calls": False}),
        (
            "/v1/messages",
            {
                "messages": USER, "max_tokens": 20, "tools": [{"name": "f", "input_schema": {"type": "object"}}],
                "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            },
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("redacted", [False, True])
def test_constrained_calls_are_marked_in_every_dialect_and_with_redaction(
    start: Start, path: str, body: dict[str, Any], redacted: bool
) -> None:
    call = recorded(start(redact=("email",) if redacted else ()), body, path)
    assert why_untrainable(call, call.choices[0]) == HELD


@pytest.mark.slow
def test_the_servers_setting_decides_which_calls_are_constrained(start: Start, tmp_path: Path) -> None:
    strict: dict[str, Any] = {"messages": USER, "tools": [tool(True)], "parallel_tool_calls": False}
    levels: dict[Any, tuple[str | None, str | None]] = {
        "off": (None, None), False: (None, None), "auto": (None, HELD), "function": (HELD, HELD),
        "parameter": (HELD, HELD),
    }  # fmt: skip
    for level, reasons in levels.items():
        proxy = start(tool_strict_level=level, journal=tmp_path / str(level))
        calls = [recorded(proxy, {"messages": USER, "tools": [tool()]}), recorded(proxy, strict)]
        assert tuple(why_untrainable(call, call.choices[0]) for call in calls) == reasons
        plain = recorded(proxy, {"messages": USER})
        assert why_untrainable(plain, plain.choices[0]) is None


def test_yaml_means_off_by_false(tmp_path: Path) -> None:
    settings = ProxySettings(
        upstreams=("http://a",), model="m", store="-", journal=tmp_path, tool_strict_level=False,
    )  # fmt: skip
    assert settings.tool_strict_level == "off"
