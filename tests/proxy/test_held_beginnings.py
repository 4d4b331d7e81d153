"""The beginning of a call waits for its end: the store gets the call at once and whole, and nothing is lost by that."""

from __future__ import annotations

import base64
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from ratchet.proxy.coordinator.shipping.shipper import Shipper
from ratchet.proxy.coordinator.shipping.store_writer import (
    DEAD_LETTERS,
    InProcessWriter,
    SegmentRange,
    WriteResult,
)
from ratchet.proxy.journal.journal import Journal
from ratchet.proxy.journal.segments import frame, records_end, segment_numbers
from ratchet.proxy.telemetry.alarm_queue import AlarmQueue
from ratchet.proxy.telemetry.metrics import ProxyMetrics
from ratchet.store.records import CallEnded, CallStarted
from ratchet.store.states import CallState
from ratchet.store.store import Store
from tests.harness import records
from tests.harness.proxy.servers import until

REPLY = {"role": "assistant", "content": "Oslo"}
_FOR_EVER = 3600.0  # seconds


class Shipping:
    """A journal with its shipper, which writes into the store."""

    def __init__(self, folder: Path, store: Store, hold_seconds: float, segment_bytes: int) -> None:
        self.store = store
        self.results: list[WriteResult] = []
        self.journal = Journal(folder, 2**24, segment_bytes, ProxyMetrics(), AlarmQueue())
        self.shipper = Shipper(
            self.journal, store, _ObservedWriter(store, self.results), ProxyMetrics(), AlarmQueue(),
            forget_durable_messages=lambda: None, hold_seconds=hold_seconds,
        )  # fmt: skip

    def states(self) -> dict[str, str]:
        """The states of the stored calls by id."""
        return {call.id: call.state for call in self.store.calls.page(100)}

    async def hold(self, start: CallStarted) -> None:
        """Write a beginning, and wait until it was read and left out."""
        self.journal.write(start)
        await until(lambda: start.call_id in {one.call_id for result in self.results for one in result.held})


class _ObservedWriter(InProcessWriter):
    """Keeps what was written."""

    def __init__(self, store: Store, results: list[WriteResult]) -> None:
        super().__init__(store)
        self._results = results

    def write(self, segment: SegmentRange) -> WriteResult:
        result = super().write(segment)
        self._results.append(result)
        return result


Begin = Callable[..., Awaitable[Shipping]]


@pytest.fixture
async def begin(tmp_path: Path, store: Store) -> AsyncIterator[Begin]:
    """Start shipping from a folder of the test's; all is stopped with the test."""
    running: list[Shipping] = []

    async def start(folder: str = "journal", hold_seconds: float = _FOR_EVER, segment_bytes: int = 2**20) -> Shipping:
        one = Shipping(tmp_path / folder, store, hold_seconds, segment_bytes)
        await one.journal.start()
        running.append(one)
        await one.shipper.start()
        return one

    yield start
    for one in running:
        await one.shipper.stop(60)
        await one.journal.stop()


def call(name: str, trajectory: str = "") -> tuple[CallStarted, CallEnded]:
    """A call as the recorder writes it: the end has no messages and tools of the beginning."""
    start = records.call_start(f"call_{name}", trajectory or f"traj_{name}", [{"role": "user", "content": name}])
    return start, records.ended(msgspec.structs.replace(start, nodes=(), tools=b""), REPLY)


def assert_whole(store: Store, name: str) -> None:
    trajectory = store.trajectories.read(f"traj_{name}")
    assert trajectory.messages == ({"role": "user", "content": name}, REPLY)
    assert trajectory.tools == tuple(records.TOOLS)


async def test_a_call_that_ends_in_time_is_written_once_and_whole(begin: Begin) -> None:
    shipping = await begin()
    start, end = call("a")
    await shipping.hold(start)
    assert shipping.states() == {}
    assert shipping.shipper.backlog == 1
    await shipping.journal.commit(end)
    await until(lambda: shipping.states() == {"call_a": CallState.ANSWERED})
    await until(lambda: shipping.shipper.backlog == 0)
    assert_whole(shipping.store, "a")


async def test_a_short_call_is_written_once_and_whole(begin: Begin) -> None:
    shipping = await begin()
    for name in "abc":
        start, end = call(name)
        shipping.journal.write(start)
        await shipping.journal.commit(end)
    await until(lambda: set(shipping.states()) == {"call_a", "call_b", "call_c"})
    for name in "abc":
        assert_whole(shipping.store, name)


async def test_a_call_that_takes_longer_is_stored_as_running(begin: Begin) -> None:
    shipping = await begin(hold_seconds=0.2)
    start, end = call("a")
    await shipping.hold(start)
    await until(lambda: shipping.states() == {"call_a": CallState.STARTED})
    await shipping.journal.commit(end)
    await until(lambda: shipping.states() == {"call_a": CallState.ANSWERED})
    assert_whole(shipping.store, "a")


async def test_who_waits_for_the_store_gets_running_calls(begin: Begin) -> None:
    shipping = await begin()
    await shipping.hold(call("a")[0])
    assert await shipping.shipper.settle(60)
    assert shipping.states() == {"call_a": CallState.STARTED}


async def test_other_components_learn_that_a_beginning_is_not_stored(begin: Begin) -> None:
    shipping = await begin()
    assert shipping.shipper.shipped_until(1.0) == 1.0
    await shipping.hold(call("running")[0])
    await shipping.journal.commit(call("later")[1])
    await until(lambda: "call_later" in shipping.states())
    assert shipping.shipper.shipped_until(2.0) == 1.0
    assert not shipping.shipper.has(1)
    assert await shipping.shipper.settle(60)
    assert shipping.shipper.shipped_until(3.0) == 3.0


async def test_the_call_of_a_rollout_is_stored_at_once(begin: Begin) -> None:
    shipping = await begin()
    shipping.journal.write(call("a", "roll_1")[0])
    await until(lambda: shipping.states() == {"call_a": CallState.STARTED})


async def test_after_a_crash_a_held_beginning_is_an_interrupted_call_and_nothing_is_stored_twice(
    begin: Begin, tmp_path: Path
) -> None:
    first = await begin()
    await first.hold(call("running")[0])
    start, end = call("done")
    first.journal.write(start)
    await first.journal.commit(end)
    await until(lambda: "call_done" in first.states())
    shutil.copytree(tmp_path / "journal", tmp_path / "crashed")
    second = await begin("crashed")
    assert second.states() == {"call_done": CallState.ANSWERED, "call_running": CallState.INTERRUPTED}
    assert second.shipper.backlog == 0
    assert_whole(first.store, "done")
    assert tuple(first.store.trajectories.read("traj_running").messages) == ({"role": "user", "content": "running"},)


async def test_after_a_crash_a_call_whose_beginning_was_held_is_whole(begin: Begin, tmp_path: Path) -> None:
    first = await begin()
    start, end = call("a")
    await first.hold(start)
    shutil.copytree(tmp_path / "journal", tmp_path / "crashed")
    segment = max((tmp_path / "crashed").glob("*.journal"))
    with segment.open("r+b") as file:  # the end became durable, and then the process was killed
        file.seek(records_end(segment))
        file.write(frame(end))
    second = await begin("crashed")
    assert second.states() == {"call_a": CallState.ANSWERED}
    assert_whole(first.store, "a")


async def test_a_call_that_ends_in_the_next_segment_is_whole(begin: Begin) -> None:
    shipping = await begin(segment_bytes=4096)
    start, end = call("long")
    await shipping.hold(start)
    for number in range(40):
        other_start, other_end = call(str(number))
        shipping.journal.write(other_start)
        await shipping.journal.commit(other_end)
    await shipping.journal.commit(end)
    await until(lambda: shipping.states().get("call_long") == CallState.ANSWERED)
    for name in ("long", "0", "39"):
        assert_whole(shipping.store, name)


async def test_a_call_that_the_store_rejects_is_one_dead_letter_with_its_messages(begin: Begin, tmp_path: Path) -> None:
    shipping = await begin()
    start, end = call("bad")
    shipping.journal.write(start)
    await shipping.journal.commit(msgspec.structs.replace(end, context="nonsense"))
    file = tmp_path / "journal" / DEAD_LETTERS
    await until(lambda: file.exists() and file.read_bytes().endswith(b"\n"))
    (line,) = file.read_bytes().splitlines()
    kept = msgspec.msgpack.decode(base64.b64decode(msgspec.json.decode(line)["record"]), type=CallEnded)
    assert kept.start.nodes == start.nodes


async def test_a_segment_is_removed_only_when_its_beginnings_are_stored(begin: Begin) -> None:
    shipping = await begin(segment_bytes=4096)
    await shipping.hold(call("running")[0])
    for number in range(40):
        await shipping.journal.commit(call(str(number))[1])
    await until(lambda: len(shipping.states()) == 41)
    assert shipping.states()["call_running"] == CallState.STARTED
    await until(lambda: len(segment_numbers(shipping.journal.folder)) == 1)
    assert shipping.shipper.has(41)
