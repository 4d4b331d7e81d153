"""Requests that wait for unshipped records delay no other request and query the store once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import sqlalchemy as sa

from ratchet.proxy.coordinator.shipping import record_lookups
from ratchet.proxy.coordinator.shipping.record_lookups import MAX_WAITING, RecordLookups
from ratchet.proxy.coordinator.shipping.shipper import Shipper
from ratchet.proxy.coordinator.shipping.store_writer import InProcessWriter, SegmentRange, WriteResult
from ratchet.proxy.journal.journal import Journal
from ratchet.proxy.telemetry.alarm_queue import AlarmQueue
from ratchet.proxy.telemetry.metrics import ProxyMetrics
from ratchet.store.errors import StoreUnavailable
from ratchet.store.ids import new_id
from ratchet.store.operation_records import ProxyInstance
from ratchet.store.store import Store
from tests.harness import records
from tests.harness.proxy.running_proxy import Proxy
from tests.harness.proxy.servers import ProxyProcess, eventually

CHAT = "/v1/chat/completions"


def chat_body(words: str) -> dict[str, Any]:
    return {"model": "agent", "messages": [{"role": "user", "content": words}]}


@contextlib.contextmanager
def not_shipping(folder: Path, vllm_url: str) -> Iterator[httpx.Client]:
    """A proxy whose shipping process is stopped, with a call that is not in the store."""
    proxy = ProxyProcess(folder, upstreams=[vllm_url])
    with httpx.Client(base_url=proxy.url, timeout=60, limits=httpx.Limits(max_connections=200)) as client:
        eventually(lambda: client.get("/health/ready").status_code == 200)
        client.post(CHAT, json=chat_body("#say=first")).raise_for_status()
        eventually(lambda: client.get("/health/backlog").json()["unshipped_records"] == 0)
        (shipping,) = psutil.Process(proxy.pid).children()
        os.kill(shipping.pid, signal.SIGSTOP)
        client.post(CHAT, json=chat_body("#say=second")).raise_for_status()
        yield client
        os.kill(shipping.pid, signal.SIGCONT)
    assert proxy.stop() == 0


@pytest.mark.slow
def test_waiting_feedback_delays_no_large_call(tmp_path: Path, vllm_url: str) -> None:
    with not_shipping(tmp_path, vllm_url) as client, ThreadPoolExecutor(24) as agents:
        client.post(CHAT, json=chat_body("x" * 300_000)).raise_for_status()
        requests = [
            agents.submit(client.post, "/api/feedback", json={"call_id": new_id("call"), "value": 1}) for _ in range(24)
        ]
        time.sleep(0.5)  # all of them have arrived
        client.post(CHAT, json=chat_body("x" * 300_000)).raise_for_status()
        assert not any(one.done() for one in requests)
        assert {one.result().status_code for one in requests} == {202}


@pytest.mark.slow
def test_waiting_requests_are_limited_per_key(tmp_path: Path, vllm_url: str) -> None:
    more = MAX_WAITING + 20
    with not_shipping(tmp_path, vllm_url) as client, ThreadPoolExecutor(more) as agents:
        requests = [agents.submit(client.get, f"/v1/responses/{new_id('resp')}") for _ in range(more)]
        refused = eventually(lambda: [one.result() for one in requests if one.done()])
        assert {(one.status_code, one.json()["error"]["code"]) for one in refused} == {(429, "too_many_waiting")}
        assert "retry-after" in refused[0].headers
        other = client.get(f"/v1/responses/{new_id('resp')}", headers={"authorization": "Bearer other"})
        assert other.status_code == 503, "it may still be on its way to the store"
        assert [one.result().status_code for one in requests].count(503) == MAX_WAITING


@pytest.mark.parametrize("way", ["feedback", "response", "items", "previous_response_id"])
def test_an_unknown_id_costs_one_query(proxy: Proxy, store: Store, way: str) -> None:
    name = new_id("resp" if way != "feedback" else "call")
    looks = []

    def count(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> None:
        if name.partition("_")[2] in str(parameters):
            looks.append(statement)

    proxy.http.post(CHAT, json=chat_body("hi"))
    proxy.settled()
    sa.event.listen(store._engine, "before_cursor_execute", count)
    if way == "feedback":
        answer = proxy.http.post("/api/feedback", json={"call_id": name, "value": 1})
    elif way == "previous_response_id":
        request = {"model": "agent", "input": "go on", way: name}
        answer = proxy.http.post("/v1/responses", json=request)
    else:
        answer = proxy.http.get(f"/v1/responses/{name}" + ("/input_items" if way == "items" else ""))
    sa.event.remove(store._engine, "before_cursor_execute", count)
    assert answer.status_code == 404
    assert len(looks) == 1


@pytest.mark.slow
def test_a_response_that_another_proxy_may_yet_ship_is_not_called_unknown(proxy: Proxy, store: Store) -> None:
    behind = ProxyInstance(id=new_id("proxy"), url="http://other", live_versions={}, pinned_trajectories={},
                           shipped_until=0.0, heartbeat_at=time.time() + 300)  # fmt: skip
    store.proxy_instances.heartbeat(behind)
    request = {"model": "agent", "input": "go on", "previous_response_id": new_id("resp")}
    name = request["previous_response_id"]
    for answer in (proxy.http.post("/v1/responses", json=request), proxy.http.get(f"/v1/responses/{name}")):
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    store.proxy_instances.remove(behind.id)
    assert proxy.http.post("/v1/responses", json=request).status_code == 404
    assert proxy.http.get(f"/v1/responses/{name}").status_code == 404


class _RangeCounter(InProcessWriter):
    """Counts the segment ranges that it carries."""

    carried = 0

    def write(self, segment: SegmentRange) -> WriteResult:
        self.carried += 1
        return super().write(segment)


@pytest.fixture
async def counted(tmp_path: Path, store: Store) -> AsyncIterator[tuple[Journal, Shipper, _RangeCounter]]:
    """A journal, its shipper and a counting writer."""
    journal = Journal(tmp_path / "journal", 2**24, 2**22, ProxyMetrics(), AlarmQueue())  # one segment
    await journal.start()
    store_writer = _RangeCounter(store)
    shipper = Shipper(journal, store, store_writer, ProxyMetrics(), AlarmQueue(), forget_durable_messages=lambda: None)
    await shipper.start()
    yield journal, shipper, store_writer
    await shipper.stop()
    await journal.stop()


@pytest.mark.slow
async def test_many_waiting_requests_do_not_end_the_batching(counted: tuple[Journal, Shipper, _RangeCounter]) -> None:
    journal, shipper, store_writer = counted
    waiting, began, number = set(), time.monotonic(), 0
    while time.monotonic() - began < 2.0:
        number += 1
        await journal.commit(records.call_start(f"call_{number}", "t"))
        waiting.add(asyncio.create_task(shipper.settle(5.0)))
        await asyncio.sleep(0.002)
    turns = (time.monotonic() - began) / 0.1 + 2  # each takes 0.1 s or more
    assert store_writer.carried <= turns + 3  # a waiting request may trigger one extra per second
    assert all(await asyncio.gather(*waiting))


@pytest.mark.parametrize("patience", [0.0, 0.01])
async def test_no_lookup_waits_longer_for_a_store_that_hangs(
    store: Store, monkeypatch: pytest.MonkeyPatch, patience: float
) -> None:
    monkeypatch.setattr(record_lookups, "_STORE_SECONDS", 0.05)
    go_on = threading.Event()
    try:
        with pytest.raises(StoreUnavailable, match="has not answered"):
            await RecordLookups(store).wait_for(lambda: go_on.wait(60) or None, None, patience, for_call=True)
    finally:
        go_on.set()
