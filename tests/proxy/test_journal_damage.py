"""A journal damaged in the middle, during a run or between two runs: the rest is shipped. A disk that fails."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import resource
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import httpx
import psutil
import pytest

from ratchet.proxy.coordinator.shipping.store_writer import InProcessWriter
from ratchet.proxy.coordinator.shipping.unwritten_records import UnwrittenRecords
from ratchet.proxy.journal.journal import LOSS_ALARM, Journal
from ratchet.proxy.journal.segments import (
    MAGIC,
    Position,
    frame,
    read_segment,
    records_end,
    segment_numbers,
    segment_path,
    write_position,
)
from ratchet.proxy.telemetry.alarm_queue import AlarmQueue
from ratchet.proxy.telemetry.metrics import ProxyMetrics
from ratchet.store.errors import StoreUnavailable
from ratchet.store.records import CallEnded, Shipment
from ratchet.store.states import CallState
from ratchet.store.store import Store, open_store
from tests.harness.proxy.servers import ProxyProcess, eventually
from tests.harness.records import TOOLS
from tests.proxy.test_journal import pair, shipping


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The journal's folder."""
    return tmp_path / "journal"


async def start_journal(folder: Path, segment_bytes: int = 2**16) -> Journal:
    """Return a journal that has started."""
    journal = Journal(folder, 2**20, segment_bytes, ProxyMetrics(), AlarmQueue())
    await journal.start()
    return journal


@pytest.mark.parametrize("harm", ["flipped", "zeros", "a length"])
@pytest.mark.parametrize("whose", ["ours", "an earlier process's"])
async def test_records_after_the_damage_are_shipped(folder: Path, store: Store, harm: str, whose: str) -> None:
    opened = await start_journal(folder)
    for n in range(9):
        await opened.commit(pair(str(n))[1])
    size = opened.bytes
    if whose != "ours":
        await opened.stop()
        opened = await start_journal(folder)
    with segment_path(opened.folder, 1).open("r+b") as file:
        begins = len(MAGIC) + (size - len(MAGIC)) // 9 * 4  # of the fifth record; all have one length
        file.seek(begins + (200 if harm == "flipped" else 0))
        file.write({"flipped": b"\xc1\xc1", "zeros": bytes(300), "a length": b"\xff\xff\xff\x00"}[harm])
    shipper = shipping(opened, store)
    await shipper.start()
    await asyncio.to_thread(eventually, lambda: len(store.calls.page(100)) == 8)
    await asyncio.to_thread(eventually, lambda: "proxy_journal_damaged" in {a.name for a in store.alarms.active()})
    await asyncio.to_thread(eventually, lambda: shipper.backlog == 0)  # the lost record is counted in the next turn
    assert opened._metrics.lost._value.get() == (whose == "ours")
    assert segment_path(opened.folder, 1).with_suffix(".damaged").exists()
    await shipper.stop()
    await opened.stop()


@pytest.mark.parametrize("size", [0, 3, 2000])
async def test_a_truncated_segment_with_a_successor_of_its_process_is_damage(
    folder: Path, store: Store, size: int
) -> None:
    first = await start_journal(folder, segment_bytes=4096)
    for n in range(12):
        await first.commit(pair(str(n))[1])
    await first.stop()
    in_second = read_segment(segment_path(folder, 2), 0, 2**20).records
    assert len(in_second) > 1
    assert segment_path(folder, 3).exists()
    os.truncate(segment_path(folder, 2), size)
    kept = len(read_segment(segment_path(folder, 2), 0, 2**20).records)
    second = await start_journal(folder)
    shipper = shipping(second, store)
    await shipper.start()
    left = 12 - len(in_second) + kept
    await asyncio.to_thread(eventually, lambda: len(store.calls.page(100)) == left)
    await asyncio.to_thread(eventually, lambda: [a.name for a in store.alarms.active()] == ["proxy_journal_damaged"])
    assert segment_path(folder, 2).with_suffix(".damaged").exists()
    await shipper.stop()
    await second.stop()


async def test_the_alarm_counts_damaged_segments_and_says_what_to_do(folder: Path, store: Store) -> None:
    first = await start_journal(folder, segment_bytes=4096)
    for n in range(12):
        await first.commit(pair(str(n))[1])
    await first.stop()
    for number in (1, 2):
        os.truncate(segment_path(folder, number), 2000)
    second = await start_journal(folder)
    shipper = shipping(second, store)
    await shipper.start()
    await asyncio.to_thread(eventually, lambda: segment_numbers(folder) == [])
    await shipper.stop()
    (alarm,) = store.alarms.active()
    assert f"damaged journal segments in {folder}: 2, the first is 000000000001.damaged" in alarm.reason
    assert "others may be lost" in alarm.reason
    assert "check that disk" in alarm.reason
    await second.stop()


async def test_a_torn_record_of_a_process_that_was_killed_is_no_damage(folder: Path, store: Store) -> None:
    for name in "abc":  # three processes: each leaves one segment, with a torn end
        opened = await start_journal(folder)
        assert await opened.commit(pair(name)[1])
        path = segment_path(folder, opened.first_segment)
        await opened.stop()
        with path.open("ab") as file:
            file.write(frame(pair("torn")[1])[:100])
    last = await start_journal(folder)
    shipper = shipping(last, store)
    await shipper.start()
    await asyncio.to_thread(eventually, lambda: segment_numbers(folder) == [])
    assert {call.id for call in store.calls.page(9)} == {"call_a", "call_b", "call_c"}
    assert not store.alarms.active()
    assert not list(folder.glob("*.damaged"))
    await shipper.stop()
    await last.stop()


async def test_a_failed_write_leaves_no_torn_record_for_a_kill(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = await start_journal(folder)
    assert await opened.commit(pair("a")[1])
    monkeypatch.setattr(opened._preallocator, "truncate_segment", lambda file, size: os.close(file))  # too late

    def write_a_part(file: int, data: bytes, at: int) -> None:
        os.pwrite(file, data[: len(data) // 2], at)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr("ratchet.proxy.journal.journal.write_all", write_a_part)
        assert await opened.commit(pair("b")[1]) is False
    assert await opened.commit(pair("c")[1])
    readings = [read_segment(segment_path(folder, number), 0, 2**20) for number in (1, 2)]
    assert [(len(one.records), one.end) for one in readings] == [(1, "end"), (2, "end")]
    await opened.stop()


async def test_a_position_of_another_journal_loses_nothing(folder: Path, store: Store) -> None:
    first = await start_journal(folder)
    await first.commit(pair("a")[1])
    await first.stop()
    write_position(first.folder, Position(1, 10**6))
    second = await start_journal(folder)
    shipper = shipping(second, store)
    await shipper.start()
    assert [call.id for call in store.calls.page(9)] == ["call_a"]
    await shipper.stop()
    await second.stop()


def full_disk(file: int, data: bytes, at: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


async def stop_on_a_full_disk(folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch, *, ships: bool) -> None:
    """Record two calls, the second one on a full disk, and stop; `ships`: the store gets the first one before."""
    journal = await start_journal(folder)
    shipper = shipping(journal, store)
    unwritten = UnwrittenRecords(journal, shipper, store, journal._alarm_queue)
    if ships:
        await shipper.start()
    assert await journal.commit(pair("a")[1])
    if ships:
        assert await shipper.settle(60)
    with monkeypatch.context() as disk:
        disk.setattr("ratchet.proxy.journal.journal.write_all", full_disk)
        journal.write(pair("b")[0])
        assert await journal.commit(pair("b")[1]) is False
        if ships:
            await shipper.stop(0.5)
        await journal.stop()
        await unwritten.stop()


async def test_records_that_a_full_disk_did_not_take_go_straight_to_the_store_at_a_stop(
    folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stop_on_a_full_disk(folder, store, monkeypatch, ships=True)
    states = {call.id: call.state for call in store.calls.page(9)}
    assert states == dict.fromkeys(("call_a", "call_b"), CallState.ANSWERED)
    assert not store.alarms.active()


@pytest.mark.parametrize("why", ["the store lacks earlier records", "the store is away"])
async def test_records_that_a_stop_discards_are_in_the_log_and_in_an_alarm(
    folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    if why == "the store is away":
        monkeypatch.setattr("ratchet.proxy.coordinator.shipping.unwritten_records.InProcessWriter", AbsentStore)
    await stop_on_a_full_disk(folder, store, monkeypatch, ships=why == "the store is away")
    assert "event=records_lost records=2" in caplog.text
    (alarm,) = store.alarms.active()
    assert alarm.name == LOSS_ALARM
    assert f"2 records of the journal {folder} are lost" in alarm.reason
    assert "make that disk writable" in alarm.reason


class AbsentStore(InProcessWriter):
    """A writer whose store is away."""

    def write_records(self, records: Sequence[Shipment], dead_letters: Path) -> NoReturn:
        raise StoreUnavailable("the store is away")


async def test_records_that_memory_cannot_keep_raise_an_alarm(
    folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ratchet.proxy.journal.journal._MAX_UNWRITTEN_BYTES", 1500)
    monkeypatch.setattr("ratchet.proxy.journal.journal.write_all", full_disk)
    journal = await start_journal(folder)
    for n in range(5):
        assert await journal.commit(pair(str(n))[1]) is False
    assert journal.records_lost > 0
    journal._alarm_queue.deliver_alarms(store)
    reasons = {alarm.name: alarm.reason for alarm in store.alarms.active()}
    assert f"{journal.records_lost} records of the journal" in reasons[LOSS_ALARM]
    await journal.stop()


@pytest.mark.parametrize(
    ("why", "remedy"),
    [
        (errno.ENOSPC, "memory: free space"),
        (errno.EIO, "memory: check that disk and .* permissions"),
        ("full", "memory: .* the store .* raise max_journal_bytes"),
        ("deleted", "memory: leave the files "),
    ],
)
async def test_the_alarm_of_a_failed_write_gives_the_remedy_of_its_cause(
    folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch, why: str | int, remedy: str
) -> None:
    def fail(file: int, data: bytes, at: int) -> None:
        assert isinstance(why, int)
        raise OSError(why, os.strerror(why))

    journal = await start_journal(folder)
    assert await journal.commit(pair("a")[1])
    match why:
        case "full":
            journal._max_bytes = 1
        case "deleted":
            segment_path(folder, 1).unlink()
        case _:
            monkeypatch.setattr("ratchet.proxy.journal.journal.write_all", fail)
    assert await journal.commit(pair("b")[1]) is False
    journal._alarm_queue.deliver_alarms(store)
    (alarm,) = store.alarms.all()
    assert re.search(remedy, alarm.reason)
    await journal.stop()


async def test_failing_writes_leave_one_segment_and_no_trace_of_them(folder: Path) -> None:
    opened = await start_journal(folder)
    assert await opened.commit(pair("a")[1])
    sizes = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, sizes[1]))  # as a full disk: a part of a record is written
    try:
        assert [await opened.commit(pair(f"b{n}" * 200)[1]) for n in range(5)] == [False] * 5
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, sizes)
    assert segment_numbers(folder) == [1, 2]
    assert segment_path(folder, 2).read_bytes() == MAGIC
    assert opened.bytes == sum(records_end(segment_path(folder, number)) for number in (1, 2))
    assert await opened.commit(pair("c")[1])
    await opened.stop()
    found = [read_segment(path, 0, 2**20) for path in sorted(folder.glob("*.journal"))]
    assert [reading.end for reading in found] == ["end"] * len(found)
    names = [record.start.call_id for reading in found for record in reading.records if isinstance(record, CallEnded)]
    assert names == ["call_a", *(f"call_{f'b{n}' * 200}" for n in range(5)), "call_c"]


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
