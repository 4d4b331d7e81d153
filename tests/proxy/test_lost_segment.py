"""A journal segment deleted before it was shipped: later trajectories are complete or marked incomplete."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from ratchet.store.store import Store, open_store
from tests.harness.proxy.servers import ProxyProcess, eventually
from tests.harness.records import TOOLS


def post_call(http: httpx.Client, name: str, system: str) -> None:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": f"I am {name}"}]
    body = {"model": "agent", "messages": messages, "tools": TOOLS}
    assert http.post(f"/t/{name}/v1/chat/completions", json=body).status_code == 200


@pytest.fixture
def running(vllm_url: str, tmp_path: Path) -> Iterator[tuple[httpx.Client, ProxyProcess, Store]]:
    """A proxy in its own process, a client and its store."""
    process = ProxyProcess(tmp_path, upstreams=[vllm_url])
    store = open_store(str(tmp_path / "store.db"))
    try:
        with httpx.Client(base_url=process.url, timeout=60) as http:
            eventually(lambda: http.get("/health/ready").status_code == 200)
            yield http, process, store
    finally:
        store.close()
        process.stop()


@contextlib.contextmanager
def shipping_stopped(process: ProxyProcess) -> Iterator[None]:
    """Stop the process that ships the journal."""
    (shipper,) = psutil.Process(process.pid).children()
    os.kill(shipper.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(shipper.pid, signal.SIGCONT)


@pytest.mark.slow
def test_after_a_lost_segment_later_trajectories_are_complete_or_marked_incomplete(
    running: tuple[httpx.Client, ProxyProcess, Store], tmp_path: Path
) -> None:
    http, process, store = running
    with shipping_stopped(process):
        post_call(http, "lost", "Be brief.")
        post_call(http, "lost2", "Be kind.")
        (segment,) = (tmp_path / "journal").glob("*.journal")
        segment.unlink()
        post_call(http, "torn", "Be kind.")  # nobody has noticed yet
    eventually(lambda: "proxy_journal_lost" in {alarm.name for alarm in store.alarms.active()})
    later = ["later0", "later1", "later2"]
    for name in later:
        post_call(http, name, "Be brief.")
    eventually(lambda: http.get("/health/backlog").json()["unshipped_records"] == 0)
    assert http.get("/health/backlog").json()["lost_records"] >= 2
    for name in later:
        found = store.trajectories.read(name)
        assert [message["role"] for message in found.messages] == ["system", "user", "assistant"]
        assert found.tools == tuple(TOOLS)
    assert store.trajectories.incomplete([*later, "torn"]) == {"torn"}
    complete = {name: http.get(f"/api/trajectories/{name}").json()["complete"] for name in (*later, "torn")}
    assert complete == dict.fromkeys(later, True) | {"torn": False}
