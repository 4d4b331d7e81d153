"""CompatCanary, a public scanner of OpenAI-style APIs, finds nothing to say against the proxy."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ratchet.store.store import open_store
from tests.harness.clients.program import Program
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import served
from tests.proxy.conftest import running

SCANNER = Program("compatcanary", "node", "compatcanary/src/cli.js")


def scan(url: str, model: str, profile: str) -> dict[str, Any]:
    """CompatCanary's report."""
    where = ["--base-url", f"{url}/v1", "--model", model, "--api-key", "x", "--profile", profile]
    command = [*SCANNER.command(), "scan", *where, "--format", "json", "--fail-on", "never"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize(("profile", "probes"), [("chat", 5), ("modern", 7)])
def test_compatcanary_passes_fully(tmp_path: Path, profile: str, probes: int) -> None:
    store = open_store(str(tmp_path / "store.db"))
    with served(ScriptedVllm(obliging=True)) as vllm, running(vllm, store, tmp_path) as proxy:
        report = scan(proxy.url, "agent", profile)
    store.close()
    assert [r for r in report["results"] if r["status"] != "pass"] == []
    assert len(report["results"]) == probes
    assert report["score"] == 100
