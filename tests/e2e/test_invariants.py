"""Invariants on the real vLLM: random weights are rejected before they serve anybody, an equal version passes."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from ratchet.demo.email_search.agent import TOOLS, opening
from ratchet.settings.project_settings import Settings
from ratchet.store.content.messages import path, tools_hash
from ratchet.store.records import Policy
from ratchet.store.states import PolicyState
from ratchet.store.store import Store, open_store
from ratchet.supervisor.vllm_command import served_name
from ratchet.trainer.adapters.vllm_api import VllmServer
from ratchet.trainer.release.invariants import Fault, InvariantsCheck, InvariantsResult
from tests.e2e.test_mixed_batches import POLICY, make_adapter
from tests.harness.records import call_start, ended
from tests.harness.vllm.engine import vllm

BASE = served_name(Settings.of({}))
PROMPTS = 24
TOPICS = ("picnic", "budget", "workshop", "invoice", "parade", "server", "garden", "contract")


def record(store: Store) -> None:
    """Ship calls of the demo's agent with different questions."""
    name, body = tools_hash(TOOLS)
    for number in range(PROMPTS):
        question = f"When is the {TOPICS[number % len(TOPICS)]} of team {number}?"
        messages = opening(question)
        start = call_start(
            f"call_{number:03}", f"run{number}", messages, nodes=path(messages), tools=body, tools_hash=name,
            sampling={"temperature": 1.0, "max_tokens": 48},
        )  # fmt: skip
        store.calls.ship([ended(start, {"role": "assistant", "content": "done"}, messages=messages)])


def version(number: int, name: str) -> Policy:
    return Policy(
        alias="agent", version=number, state=PolicyState.CANDIDATE, served_name=name, adapter=None, created_at=1.0
    )


@pytest.mark.e2e
def test_random_weights_are_rejected_and_an_equal_version_passes(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store.db"))
    record(store)
    folders = {
        "noise": make_adapter(tmp_path / "noise", 1),
        "equal": make_adapter(tmp_path / "equal", 2, changes=False),
    }
    with vllm(POLICY, tmp_path / "vllm.log", "--max-loras", "2", "--dtype", "float32", max_model_len=1024) as url:
        for name, folder in folders.items():
            loaded = httpx.post(
                f"{url}/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(folder)}, timeout=60
            )
            assert loaded.status_code == 200, loaded.text
        server = VllmServer(url)
        check = InvariantsCheck(store, [server], alias="agent", prompts=PROMPTS, max_tokens=64)
        found: dict[str, InvariantsResult] = {
            name: check.evaluate(version(number, name), version(0, BASE), lambda: None)
            for number, name in enumerate(folders, start=1)
        }
        server.close()
    store.close()
    assert (found["noise"].prompts, found["noise"].answers) == (PROMPTS, 2 * PROMPTS)
    assert found["noise"].broken, found["noise"]
    assert not found["equal"].broken, found["equal"]
    broken = {one.fault for one in found["noise"].faults if one.broken}
    assert Fault.UNCERTAIN in broken
    assert Fault.FAILED not in broken
