"""A journal damaged in the middle, during a run or between two runs: the rest is shipped. A disk that fails."""

from __future__ import annotations

import asyncio
import resource
from pathlib import Path

import pytest

from ratchet.proxy.journal.journal import Journal
from ratchet.proxy.journal.segments import (
    MAGIC,
    Position,
    read_segment,
    records_end,
    segment_numbers,
    segment_path,
    write_position,
)
from ratchet.proxy.telemetry.alarm_queue import AlarmQueue
from ratchet.proxy.telemetry.metrics import ProxyMetrics
from ratchet.store.records import CallEnded
from ratchet.store.store import Store
from tests.harness.proxy.servers import eventually
from tests.proxy.test_journal import pair, shipping


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The journal's folder."""
    return tmp_path / "journal"


async def start_journal(folder: Path) -> Journal:
    """Return a journal that has started."""
    journal = Journal(folder, 2**20, 2**16, ProxyMetrics(), AlarmQueue())
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
