"""The journal's files and how they are shipped, without a server."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from ratchet.proxy.coordinator.shipping.shipper import Shipper
from ratchet.proxy.coordinator.shipping.store_writer import DEAD_LETTERS, InProcessWriter, SegmentRange, WriteResult
from ratchet.proxy.errors import ProxyError
from ratchet.proxy.journal.journal import ALARM, Journal
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
from ratchet.store.records import CallEnded, CallStarted
from ratchet.store.states import CallState
from ratchet.store.store import Store
from tests.harness import records
from tests.harness.proxy.servers import eventually

REPLY = {"role": "assistant", "content": "Oslo"}


def pair(name: str) -> tuple[CallStarted, CallEnded]:
    start = records.call_start(f"call_{name}", f"traj_{name}")
    return start, records.ended(start, REPLY)


Open = Callable[..., Journal]


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[Open]:
    """Open journals in one folder; all are stopped with the test."""
    opened: list[Journal] = []

    def begin(max_bytes: int = 2**20, journal_segment_bytes: int = 2**16, folder: str = "journal") -> Journal:
        opened.append(Journal(tmp_path / folder, max_bytes, journal_segment_bytes, ProxyMetrics(), AlarmQueue()))
        return opened[-1]

    yield begin
    for one in opened:
        if one._thread.is_alive():
            await one.stop()


def shipping(journal: Journal, store: Store) -> Shipper:
    return Shipper(
        journal,
        store,
        InProcessWriter(store),
        journal._metrics,
        journal._alarm_queue,
        forget_durable_messages=lambda: None,
    )


@pytest.mark.parametrize("cut", [1, 7, 8, 9, 20])
def test_a_torn_tail_ends_the_reading_and_earlier_records_are_kept(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "000000000001.journal"
    whole = MAGIC + frame(pair("a")[0]) + frame(pair("b")[1])
    path.write_bytes(whole + frame(pair("c")[0])[:cut])
    reading = read_segment(path, 0, 2**20)
    assert reading.records == [pair("a")[0], pair("b")[1]]
    assert (reading.offset, reading.end) == (len(whole), "torn")


def test_a_flipped_bit_is_damage_and_not_skipped(tmp_path: Path) -> None:
    path = tmp_path / "000000000001.journal"
    data = bytearray(MAGIC + frame(pair("a")[0]) + frame(pair("b")[0]))
    data[-5] ^= 1
    path.write_bytes(data)
    reading = read_segment(path, 0, 2**20)
    assert (len(reading.records), reading.end) == (1, "damaged")


ZEROS = bytes(3000)  # as in preallocated blocks


def test_zeros_after_the_records_end_them(tmp_path: Path) -> None:
    path = tmp_path / "000000000001.journal"
    whole = MAGIC + frame(pair("a")[0]) + frame(pair("b")[1])
    for tail in (ZEROS, bytes(9), bytes(2**21)):
        path.write_bytes(whole + tail)
        reading = read_segment(path, 0, 2**20)
        assert (len(reading.records), reading.offset, reading.end) == (2, len(whole), "end")
        assert records_end(path) == len(whole)
        assert read_segment(path, 0, 2**20, until=len(whole)) == reading
    assert read_segment(path, 0, 2**20, until=len(whole) + 100).end == "damaged", "records were there"


@pytest.mark.parametrize("cut", [1, 2, 7, 8, 9, 20, 60])
def test_a_frame_torn_among_zeros_is_torn_and_not_damaged(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "000000000001.journal"
    whole = MAGIC + frame(pair("a")[0])
    path.write_bytes(whole + frame(pair("c")[1])[:cut] + ZEROS)
    reading = read_segment(path, 0, 2**20)
    assert (len(reading.records), reading.offset, reading.end) == (1, len(whole), "torn")


@pytest.mark.parametrize("harm", ["flipped", "hole", "hole at first"])
def test_damage_among_zeros_is_not_taken_for_the_end(tmp_path: Path, harm: str) -> None:
    path = tmp_path / "000000000001.journal"
    frames = [frame(pair(name)[1]) for name in "abc"]
    match harm:
        case "flipped":
            frames[2] = frames[2][:-5] + bytes([frames[2][-5] ^ 1]) + frames[2][-4:]
        case "hole":
            frames[2:2] = [ZEROS]
        case "hole at first":
            frames[0] = bytes(len(frames[0]))
    path.write_bytes(MAGIC + b"".join(frames) + ZEROS)
    reading = read_segment(path, 0, 2**20)
    assert (len(reading.records), reading.end) == (0 if harm == "hole at first" else 2, "damaged")


@pytest.mark.parametrize("tail", [0, 5, 8, 299, 4000])
def test_reading_in_pieces_gives_the_same_records(tmp_path: Path, tail: int) -> None:
    path = tmp_path / "000000000001.journal"
    written = [record for n in range(30) for record in pair(str(n))]
    path.write_bytes(MAGIC + b"".join(frame(record) for record in written) + bytes(tail))
    found, offset, end = [], 0, "more"
    while end == "more":
        reading = read_segment(path, offset, 300)  # smaller than one record
        found += reading.records
        offset, end = reading.offset, reading.end
    assert (found, end) == (written, "torn" if tail == 5 else "end")  # fewer bytes than a frame's header hold no record


async def test_a_commit_is_on_disk_when_it_resolves(journal: Open) -> None:
    opened = journal()
    await opened.start()
    opened.write(pair("a")[0])
    assert await asyncio.gather(*(opened.commit(pair(str(n))[1]) for n in range(50))) == [True] * 50
    assert len(read_segment(segment_path(opened.folder, 1), 0, 2**20).records) == 51


async def test_a_segments_blocks_are_written_before_its_records(journal: Open) -> None:
    opened = journal(journal_segment_bytes=2**14)
    await opened.start()
    path = segment_path(opened.folder, 1)
    assert await opened.commit(pair("a")[1])
    assert path.stat().st_size == 2**14, "zeros behind the record"
    assert opened.bytes == records_end(path) < 2000, "which count as nothing"
    records = [await opened.commit(pair(str(n))[1]) for n in range(40)]
    await asyncio.to_thread(eventually, lambda: path.stat().st_size == records_end(path))  # a full segment is truncated
    await opened.stop()
    segments = [segment_path(opened.folder, number) for number in segment_numbers(opened.folder)]
    assert len(segments) > 1
    assert sum(len(read_segment(one, 0, 2**20).records) for one in segments) == 1 + len(records)
    assert sum(one.stat().st_size for one in segments) == opened.bytes, "no zeros are left"
    assert {one.name for one in opened.folder.iterdir()} == {"lock"} | {one.name for one in segments}


async def test_without_space_for_preallocation_segments_grow(journal: Open, caplog: pytest.LogCaptureFixture) -> None:
    opened = journal()
    (opened.folder / "next.blank").mkdir(parents=True)  # in the way
    await opened.start()
    for name in "abc":
        assert await opened.commit(pair(name)[1])
    await opened.stop()
    assert segment_path(opened.folder, 1).stat().st_size == opened.bytes
    assert len(read_segment(segment_path(opened.folder, 1), 0, 2**20).records) == 3
    assert caplog.text.count("event=segment_not_preallocated") == 1


async def test_records_of_a_killed_process_among_zeros_are_shipped_and_counted(
    journal: Open, store: Store, tmp_path: Path
) -> None:
    first = journal()
    await first.start()
    first.write(pair("lost")[0])
    await first.commit(pair("done")[1])
    await asyncio.to_thread(eventually, lambda: (first.folder / "next.blank").exists())
    shutil.copytree(first.folder, tmp_path / "left")  # as a kill would leave it
    with segment_path(tmp_path / "left", 1).open("r+b") as file:  # a third record is torn
        file.seek(first.bytes)
        file.write(frame(pair("torn")[1])[:100])
    second = journal(folder="left")
    await second.start()
    assert second.bytes < first.bytes + 2000
    shipper = shipping(second, store)
    await shipper.start()
    states = {call.id: call.state for call in store.calls.page(9)}
    assert states == {"call_lost": CallState.INTERRUPTED, "call_done": CallState.ANSWERED}
    await asyncio.to_thread(eventually, lambda: segment_numbers(second.folder) == [])
    assert not store.alarms.active()
    assert second.bytes == 0
    await shipper.stop()


async def test_records_under_a_blanks_first_name_are_shipped(journal: Open, store: Store, tmp_path: Path) -> None:
    first = journal()
    await first.start()
    await first.commit(pair("done")[1])
    (tmp_path / "left").mkdir()  # as after a power cut before the rename is durable
    shutil.copyfile(segment_path(first.folder, 1), tmp_path / "left" / "next.blank")
    write_position(tmp_path / "left", Position(1, 8))
    second = journal(folder="left")
    await second.start()
    assert segment_numbers(second.folder) == [3]
    assert await second.commit(pair("more")[1])
    shipper = shipping(second, store)
    await shipper.start()
    await shipper.stop()
    assert {call.id for call in store.calls.page(9)} == {"call_done", "call_more"}


async def test_one_folder_belongs_to_one_proxy(journal: Open) -> None:
    await journal().start()
    with pytest.raises(ProxyError, match="another --journal folder"):
        await journal().start()


async def test_segments_are_shipped_and_deleted(journal: Open, store: Store) -> None:
    opened = journal(journal_segment_bytes=4096)
    await opened.start()
    shipper = shipping(opened, store)
    await shipper.start()
    for n in range(40):
        opened.write(pair(str(n))[0])
        await opened.commit(pair(str(n))[1])
    await shipper.stop()
    assert len(store.calls.page(100)) == 40
    assert len(segment_numbers(opened.folder)) == 1
    assert shipper.backlog == 0
    assert shipper.shipped_until(5.0) == 5.0
    opened.write(pair("late")[0])
    assert shipper.shipped_until(6.0) == 5.0


async def test_records_that_arrive_during_shipping_are_batched(journal: Open, store: Store) -> None:
    opened = journal()
    await opened.start()
    store_writer = _CarryCounter(store)
    shipper = Shipper(
        opened, store, store_writer, opened._metrics, opened._alarm_queue, forget_durable_messages=lambda: None
    )
    await shipper.start()
    began = time.monotonic()
    for n in range(50):
        await opened.commit(pair(str(n))[1])
        await asyncio.sleep(0.005)
    most = (time.monotonic() - began) / 0.1 + 2  # each turn takes 0.1 s or more
    assert store_writer.carried <= most
    await shipper.stop()
    assert len(store.calls.page(100)) == 50


class _CarryCounter(InProcessWriter):
    """Counts its calls of `carry`."""

    carried = 0

    def write(self, segment: SegmentRange) -> WriteResult:
        self.carried += 1
        return super().write(segment)


async def test_a_restart_ships_old_records_and_interrupts_unended_calls(journal: Open, store: Store) -> None:
    first = journal()
    await first.start()
    first.write(pair("lost")[0])
    await first.commit(pair("done")[1])
    await first.stop()
    second = journal()
    await second.start()
    shipper = shipping(second, store)
    await shipper.start()
    states = {call.id: call.state for call in store.calls.page(9)}
    assert states == {"call_lost": CallState.INTERRUPTED, "call_done": CallState.ANSWERED}
    await second.commit(pair("next")[1])
    await shipper.stop()
    assert len(store.calls.page(9)) == 3
    await second.stop()
    third = journal()
    await third.start()
    assert third._number >= 2  # numbers continue although every segment was deleted
    again = shipping(third, store)
    await again.start()
    await again.stop()
    assert len(store.calls.page(9)) == 3


@pytest.mark.slow
async def test_a_full_journal_keeps_records_in_memory_and_writes_them_later(journal: Open, store: Store) -> None:
    opened = journal(max_bytes=3000)
    await opened.start()
    results = [await opened.commit(pair(str(n))[1]) for n in range(10)]
    assert results[0] is True
    assert results[-1] is False
    shipper = shipping(opened, store)
    await shipper.start()
    await asyncio.to_thread(eventually, lambda: [a for a in store.alarms.all() if a.name == ALARM])
    await asyncio.to_thread(eventually, lambda: len(store.calls.page(100)) == 10)
    await asyncio.to_thread(eventually, lambda: not store.alarms.active())
    await shipper.stop()


@pytest.mark.parametrize("harm", ["deleted", "flipped", "truncated", "emptied"])
async def test_unshippable_records_are_counted_as_lost_and_raise_an_alarm(
    journal: Open, store: Store, harm: str
) -> None:
    opened = journal()
    await opened.start()
    for n in range(5):
        await opened.commit(pair(str(n))[1])
    path = segment_path(opened.folder, 1)
    data = path.read_bytes()[: opened.bytes]
    match harm:
        case "deleted":
            path.unlink()
        case "flipped":
            path.write_bytes(data[:-5] + bytes([data[-5] ^ 1]) + data[-4:] + ZEROS)
        case "truncated":
            path.write_bytes(data[:-5])
        case "emptied":
            path.write_bytes(b"")
    shipper = shipping(opened, store)
    await shipper.start()
    names = {"proxy_journal_lost"} | ({"proxy_journal_damaged"} if harm != "deleted" else set())
    await asyncio.to_thread(eventually, lambda: {alarm.name for alarm in store.alarms.active()} == names)
    lost = 1 if harm in ("flipped", "truncated") else 5
    assert opened._metrics.lost._value.get() == lost
    assert shipper.backlog == 0
    assert shipper.shipped_until(7.0) == 7.0
    for n in range(5, 10):
        await opened.commit(pair(str(n))[1])
    assert await shipper.settle(5.0)
    assert len(store.calls.page(100)) == 10 - lost
    assert shipper.shipped_until(8.0) == 8.0
    await shipper.stop()
    assert opened.bytes == records_end(segment_path(opened.folder, 2))


@pytest.mark.slow
async def test_a_small_journal_is_emptied_by_shipping(journal: Open, store: Store) -> None:
    opened = journal(max_bytes=6000, journal_segment_bytes=2**20)
    await opened.start()
    shipper = shipping(opened, store)
    await shipper.start()
    for n in range(30):
        await opened.commit(pair(str(n))[1])
    await asyncio.to_thread(eventually, lambda: len(store.calls.page(100)) == 30, 10)
    await opened.commit(pair("late")[1])  # if the journal is full, the segment is closed, shipped and deleted
    await asyncio.to_thread(eventually, lambda: len(store.calls.page(100)) == 31)
    await asyncio.to_thread(eventually, lambda: not store.alarms.active())
    await shipper.stop()


async def test_a_deleted_folder_is_noticed_and_created_again(journal: Open) -> None:
    opened = journal()
    await opened.start()
    assert await opened.commit(pair("a")[1])
    shutil.rmtree(opened.folder, ignore_errors=True)
    shutil.rmtree(opened.folder, ignore_errors=True)  # the writer may have created the next segment meanwhile
    assert await opened.commit(pair("b")[1]) is False
    assert await opened.commit(pair("c")[1]) is True
    (number,) = segment_numbers(opened.folder)
    assert read_segment(segment_path(opened.folder, number), 0, 2**20).records == [pair("b")[1], pair("c")[1]]


async def test_a_record_that_the_store_refuses_is_set_aside_and_shipping_continues(journal: Open, store: Store) -> None:
    opened = journal()
    await opened.start()
    shipper = shipping(opened, store)
    bad = msgspec.structs.replace(pair("bad")[1], context="nonsense")
    await asyncio.gather(*(opened.commit(record) for record in (pair("a")[1], bad, pair("b")[1])))
    await shipper.start()
    await asyncio.to_thread(eventually, lambda: [a for a in store.alarms.active() if "call_bad" in a.reason])
    await shipper.stop()
    assert {call.id for call in store.calls.page(9)} == {"call_a", "call_b"}
    (line,) = (opened.folder / DEAD_LETTERS).read_bytes().splitlines()
    assert msgspec.json.decode(line)["call"] == "call_bad"
