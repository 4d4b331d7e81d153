"""Strict tools and the real vLLM: what its own parser holds to a grammar is marked; as `up` starts it, nothing is."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from functools import partial
from typing import Any

import httpx
import pytest

from ratchet.demo.email_search.agent import TOOLS
from ratchet.proxy.dialects.chat import Chat
from ratchet.proxy.dialects.tool_grammar import mark_tool_grammar
from ratchet.proxy.wire.body_bounds import BodyBounds
from ratchet.store.records import TOOL_GRAMMAR
from ratchet.store.store import open_store
from ratchet.trainer.rows.build_rows import why_untrainable
from tests.e2e.conftest import POLICY
from tests.harness.cli.project import ROOT, Project, wait_for

STRICT: Any = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}]
REQUESTS: dict[str, dict[str, Any]] = {
    "strict": {"tools": STRICT},
    "one call": {"tools": list(TOOLS), "parallel_tool_calls": False},
    "free": {"tools": list(TOOLS)},
}


def strict(value: Any) -> list[Any]:
    return [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": value}}]


CASES = REQUESTS | {
    "strict in words": {"tools": strict("true")},
    "not strict": {"tools": strict(False)},
    "one call in a number": {"tools": list(TOOLS), "parallel_tool_calls": 0},
    "several calls": {"tools": list(TOOLS), "parallel_tool_calls": True},
    "no call": {"tools": STRICT, "tool_choice": "none"},
    "auto": {"tools": STRICT, "tool_choice": "auto"},
}


def held(enforced: str) -> set[str]:
    """Return the requests that vLLM's own parser holds to a grammar."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.harness.vllm.strict_probe", str(POLICY)],
        input=json.dumps(CASES), text=True, check=True,
        env=os.environ | {"VLLM_ENFORCE_STRICT_TOOL_CALLING": enforced}, stdout=subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    return {name for name, is_held in json.loads(result.stdout.splitlines()[-1]).items() if is_held}


@pytest.mark.e2e
def test_the_proxy_marks_what_vllms_own_parser_holds_to_a_grammar_and_nothing_else() -> None:
    assert held("0") == set()
    marked = {name for name, fields in CASES.items() if _is_marked(fields)}
    assert held("1") == marked == {"strict", "strict in words", "one call", "one call in a number", "auto"}


def _is_marked(fields: dict[str, Any]) -> bool:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Find it"}], **fields}).encode()
    request = asyncio.run(Chat(BodyBounds(10**6, 100, 100, 100, 10**6)).read(body, None))
    return TOOL_GRAMMAR in mark_tool_grammar(request, "auto").request.sampling


@pytest.mark.e2e
def test_strict_tools_are_trained_as_up_starts_vllm(project: Project) -> None:
    running = project.running()
    store = open_store(str(project.state / "store.db"))

    def is_stored(run: str) -> bool:
        return any(call.state == "answered" for call in store.calls.page(trajectory=run))

    for name, fields in REQUESTS.items():
        run = "strict-" + name.replace(" ", "-")
        body = {"model": "mail", "messages": [{"role": "user", "content": "Find it"}], "max_tokens": 16, **fields}
        path = f"{running['proxy_url']}/t/{run}/v1/chat/completions"
        httpx.post(path, json=body, timeout=60).raise_for_status()
        wait_for("the call is in the store", partial(is_stored, run))
        (call,) = store.calls.page(trajectory=run)
        assert why_untrainable(call, call.choices[0]) is None
    store.close()
