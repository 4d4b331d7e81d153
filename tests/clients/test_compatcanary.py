"""CompatCanary, a public scanner of OpenAI-compatible APIs, passes the proxy."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratchet.store.store import open_store
from tests.harness.clients.program import compatcanary_report
from tests.harness.proxy.running_proxy import running
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.scripts import obliging
from tests.harness.proxy.servers import served

pytestmark = pytest.mark.clients


@pytest.mark.parametrize(("profile", "probes"), [("chat", 5), ("modern", 7)])
def test_compatcanary_passes_fully(tmp_path: Path, profile: str, probes: int) -> None:
    store = open_store(str(tmp_path / "store.db"))
    with served(ScriptedVllm(play=obliging)) as vllm, running(vllm, store, tmp_path) as proxy:
        report = compatcanary_report(proxy.url, "agent", profile)
    store.close()
    assert [r for r in report["results"] if r["status"] != "pass"] == []
    assert len(report["results"]) == probes
    assert report["score"] == 100
