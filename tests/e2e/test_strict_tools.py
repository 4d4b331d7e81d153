"""Strict tools on the real vLLM: as `up` starts it no grammar chooses a token, as it starts by itself one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.email_search.tools import TOOLS
from store import open_store
from tests.e2e.conftest import POLICY
from tests.e2e.engine import vllm
from tests.ratchet.project import Project, wait_for
from trainer.learning.rows import why_untrainable

STRICT: Any = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}]
ASKED: dict[str, dict[str, Any]] = {
    "strict": {"tools": STRICT},
    "one call": {"tools": list(TOOLS), "parallel_tool_calls": False},
    "free": {"tools": list(TOOLS)},
}


def held(url: str, model: str) -> list[str]:
    """Return the requests whose tokens a grammar would choose among, by what the server itself makes of them."""
    found = []
    for name, fields in ASKED.items():
        body = {"model": model, "messages": [{"role": "user", "content": "Find it"}], **fields}
        answer = httpx.post(f"{url}/v1/chat/completions/render", json=body, timeout=60)
        answer.raise_for_status()
        if (answer.json()["sampling_params"] or {}).get("structured_outputs"):
            found.append(name)
    return found


@pytest.mark.e2e
def test_strict_tools_are_trained_as_up_starts_vllm(project: Project) -> None:
    running = project.running()
    assert held(running["vllm_url"], "mail@0") == []
    store = open_store(str(project.state / "store.db"))
    for name, fields in ASKED.items():
        run = "strict-" + name.replace(" ", "-")
        body = {"model": "mail", "messages": [{"role": "user", "content": "Find it"}], "max_tokens": 16, **fields}
        path = f"{running['proxy_url']}/t/{run}/v1/chat/completions"
        httpx.post(path, json=body, timeout=60).raise_for_status()
        wait_for("the call is in the store", lambda run=run: store.calls.page(trajectory=run))  # type: ignore[misc]
        (call,) = store.calls.page(trajectory=run)
        assert why_untrainable(call, call.choices[0]) is None
    store.close()


@pytest.mark.e2e
def test_vllm_by_itself_holds_to_a_grammar_what_the_proxy_then_marks(tmp_path: Path) -> None:
    strict = {"enforce_strict_tool_calling": True}
    with vllm(POLICY, tmp_path / "vllm.log", max_model_len=1024, **strict) as url:
        model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        assert held(url, model) == ["strict", "one call"]
