"""The process that ships the journal: when it dies, when its proxy dies, when the store fails."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from ratchet.proxy.coordinator.shipping.store_writer import DEAD_LETTERS, SegmentRange
from ratchet.proxy.coordinator.shipping.writer_process import WriterProcess
from ratchet.proxy.journal.segments import MAGIC, frame
from ratchet.store.errors import StoreError
from ratchet.store.store import Store
from tests.harness import records
from tests.harness.proxy.servers import ProxyProcess, eventually, spoil

BODY: Any = {"model": "agent", "messages": [{"role": "user", "content": "hi"}]}
REPLY = {"role": "assistant", "content": "Oslo"}


def segment(folder: Path, *ends: Any) -> SegmentRange:
    path = folder / "000000000001.journal"
    path.write_bytes(MAGIC + b"".join(frame(end) for end in ends))
    return SegmentRange(str(path), 0, None)


def end(name: str) -> Any:
    return records.ended(records.call_start(f"call_{name}", f"traj_{name}"), REPLY)


@pytest.fixture
def store_writer(tmp_path: Path, store: Store) -> Iterator[WriterProcess]:
    process = WriterProcess(str(tmp_path / "store.db"))
    process.start()
    yield process
    process.close()


def ready(url: str) -> bool:
    return httpx.get(url + "/health/ready", timeout=60).status_code == 200


def test_records_reach_the_store_and_refused_ones_are_set_aside(
    store_writer: WriterProcess, store: Store, tmp_path: Path
) -> None:
    bad = msgspec.structs.replace(end("bad"), context="nonsense")
    carried = store_writer.write(segment(tmp_path, end("a"), bad, end("b")))
    assert (carried.records, carried.end) == (3, "end")
    assert set(carried.ended) == {"call_a", "call_bad", "call_b"}
    assert [letter.call_id for letter in carried.dead] == ["call_bad"]
    assert {call.id for call in store.calls.page(9)} == {"call_a", "call_b"}
    assert b"call_bad" in (tmp_path / DEAD_LETTERS).read_bytes()


def test_a_failing_store_and_a_missing_segment_have_their_own_errors(
    store_writer: WriterProcess, store: Store, tmp_path: Path
) -> None:
    with pytest.raises(OSError, match="No such file"):
        store_writer.write(SegmentRange(str(tmp_path / "000000000009.journal"), 0, None))
    store.close()
    spoil(*tmp_path.glob("store.db*"))
    with pytest.raises(StoreError, match="not a database"):
        store_writer.write(segment(tmp_path, end("a")))


@pytest.mark.slow
def test_a_killed_process_is_replaced_at_the_next_segment_range(
    store_writer: WriterProcess, store: Store, tmp_path: Path
) -> None:
    piece = segment(tmp_path, end("a"))
    assert store_writer.write(piece).records == 1
    first = store_writer.pid
    assert first is not None
    psutil.Process(first).kill()
    with pytest.raises(OSError, match="died"):
        store_writer.write(piece)
    assert store_writer.write(piece).records == 1
    assert store_writer.pid not in (first, None)
    assert len(store.calls.page(9)) == 1


@pytest.mark.slow
def test_a_proxy_whose_shipping_process_is_killed_loses_nothing(vllm_url: str, tmp_path: Path, store: Store) -> None:
    proxy = ProxyProcess(tmp_path, upstreams=[vllm_url])
    eventually(partial(ready, proxy.url))
    with httpx.Client(base_url=proxy.url) as client:
        for turn in range(30):
            if turn % 10 == 5:
                for child in psutil.Process(proxy.pid).children():
                    child.kill()
            assert client.post("/v1/chat/completions", json=BODY).status_code == 200
        eventually(lambda: client.get("/health/backlog").json()["unshipped_records"] == 0)
    assert proxy.stop() == 0
    assert len(store.calls.page(100, state="answered")) == 30


@pytest.mark.slow
@pytest.mark.parametrize("way", ["kill", "stop"])
def test_the_shipping_process_ends_with_its_proxy(vllm_url: str, tmp_path: Path, way: str) -> None:
    proxy = ProxyProcess(tmp_path, upstreams=[vllm_url])
    eventually(partial(ready, proxy.url))
    children = psutil.Process(proxy.pid).children()
    assert len(children) == 1
    getattr(proxy, way)()
    eventually(lambda: not children[0].is_running())
