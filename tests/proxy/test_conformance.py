"""Public conformance suites against the proxy; each remaining failure is listed with its reason."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ratchet.store.store import Store
from tests.harness.proxy.running_proxy import running
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.scripts import obliging
from tests.harness.proxy.servers import served

# The suite skips its reasoning cases for models whose names it does not know.
MODEL = "gpt-5-claude-3-5"

# vLLM sends these members as null where OpenAI's schema omits them; chat answers are passed on unchanged.
NULLS_OF_VLLM = {
    "choices.0.message.annotations: None is not of type 'array'",
    "choices.0.message.function_call: None is not of type 'object'",
    "service_tier: None is not one of ['auto', 'default', 'flex']",
}
KNOWN: dict[str, set[str]] = {
    "openai-chat": {
        "chat-basic-response",
        "chat-system-prompt",
        "chat-multi-turn",
        "chat-tool-calling",
        "chat-image-input",
        "chat-reasoning-summary",
    },
    "open-responses": set(),
    "anthropic": set(),
}


def comply(url: str, form: str) -> list[dict[str, Any]]:
    """Run llm-comply; return its results."""
    tool = Path(sys.executable).parent / "llm-comply"
    command = [str(tool), "--format", form, "-u", f"{url}/v1", "-k", "x", "-m", MODEL, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    results: list[dict[str, Any]] = json.loads(done.stdout)["results"]
    return results


@pytest.mark.slow
@pytest.mark.parametrize(("form", "cases"), [("openai-chat", 9), ("open-responses", 13), ("anthropic", 9)])
def test_llm_comply_passes_except_for_the_listed_cases(store: Store, tmp_path: Path, form: str, cases: int) -> None:
    agents: dict[str, Any] = {"model": "", "agents": (MODEL, "another")}  # with one agent a call need not name it
    with served(ScriptedVllm(play=obliging)) as vllm, running(vllm, store, tmp_path, **agents) as proxy:
        results = comply(proxy.url, form)
    assert len(results) >= cases
    failed = {result["id"]: set(result["errors"]) for result in results if result["status"] != "passed"}
    assert set(failed) == KNOWN[form]
    assert all(errors == NULLS_OF_VLLM for errors in failed.values())
