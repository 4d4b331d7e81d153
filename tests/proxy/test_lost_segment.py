"""A journal's segment that is deleted before the store has it: what is recorded later is whole, or marked as not."""

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


def say(http: httpx.Client, name: str, system: str) -> None:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": f"I am {name}"}]
    body = {"model": "agent", "messages": messages, "tools": TOOLS}
    assert http.post(f"/t/{name}/v1/chat/completions", json=body).status_code == 200


@pytest.fixture
def running(vllm_url: str, tmp_path: Path) -> Iterator[tuple[httpx.Client, ProxyProcess, Store]]:
    """A proxy in its own process, a client and its store."""
    process = ProxyProcess(tmp_path, upstreams=[vllm_url])
    store = open_store(str(tmp_path / "store.db"))
    try:
        with httpx.Client(base_url=process.url, timeout=20) as http:
            eventually(lambda: http.get("/health/ready").status_code == 200, 10)
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


def test_after_a_lost_segment_later_trajectories_are_whole_or_marked_as_not(
    running: tuple[httpx.Client, ProxyProcess, Store], tmp_path: Path
) -> None:
    http, process, store = running
    with shipping_stopped(process):
        say(http, "lost", "Be brief.")
        say(http, "lost2", "Be kind.")
        (segment,) = (tmp_path / "journal").glob("*.journal")
        segment.unlink()
        say(http, "torn", "Be kind.")  # nobody has noticed yet
    eventually(lambda: "proxy_journal_lost" in {alarm.name for alarm in store.alarms.active()})
    later = ["later0", "later1", "later2"]
    for name in later:
        say(http, name, "Be brief.")
    eventually(lambda: http.get("/health/backlog").json()["unshipped_records"] == 0)
    for name in later:
        found = store.trajectories.read(name)
        assert [message["role"] for message in found.messages] == ["system", "user", "assistant"]
        assert found.tools == tuple(TOOLS)
    assert store.trajectories.incomplete([*later, "torn"]) == {"torn"}
    told = {name: http.get(f"/api/trajectories/{name}").json()["complete"] for name in (*later, "torn")}
    assert told == dict.fromkeys(later, True) | {"torn": False}
