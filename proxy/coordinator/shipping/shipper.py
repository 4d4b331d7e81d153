"""Moves the journal into the store, in order, as often as it takes: says what is carried next, and keeps the place.

Promises: a record leaves the journal only after the store has it; while the store is down nothing is lost and nothing
waits for it; a record that the store refuses for good (`store_writer.py` puts it aside) is told by a counter and an
alarm. Where something is deleted from the store, the recorder hears of it within about a second, before the next batch.
What cannot be shipped any more, since its segment was deleted or is damaged, is counted as lost and told by an alarm;
the recorder then writes every message again, and `store.completeness` finds what was recorded without some meanwhile.
Calls that an earlier proxy process began and never ended become `interrupted` once its segments are shipped.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from ratchet.proxy.coordinator.shipping.store_writer import DEAD_LETTERS, Carried, SegmentRange, StoreWriter
from ratchet.proxy.coordinator.tool_checks.tool_counts import ToolCallCounters
from ratchet.proxy.journal.journal import Journal, SegmentContent
from ratchet.proxy.journal.segments import (
    Position,
    next_frame,
    read_position,
    segment_numbers,
    segment_path,
    write_position,
)
from ratchet.proxy.runtime.critical_tasks import CriticalTasks
from ratchet.proxy.telemetry.alarm_queue import AlarmQueue
from ratchet.proxy.telemetry.metrics import ProxyMetrics
from ratchet.store.errors import SchemaMismatch, StoreUnavailable
from ratchet.store.store import Store

log = logging.getLogger("ratchet.proxy")

DEAD_LETTER_ALARM = "proxy_dead_letters"
DAMAGE_ALARM = "proxy_journal_damaged"
LOSS_ALARM = "proxy_journal_lost"
_LINGER = 0.1  # seconds to let a batch grow: most calls then end in the batch that they begin in
_BUSY_LINGER = 0.3  # the same while `_MANY` records and more come meanwhile: a batch costs as much as 25 calls
_MANY = 100
_LONGEST_WAIT = 5.0  # seconds between tries while the store is down
_HURRY_EVERY = 1.0  # seconds between batches that do not grow because somebody waits for one
_LOOK_EVERY = 1.0  # seconds between looks for deletions; `store.deletion` counts on it


class Shipper:
    """The one thread between journal and store."""

    def __init__(
        self,
        journal: Journal,
        store: Store,
        store_writer: StoreWriter,
        metrics: ProxyMetrics,
        alarm_queue: AlarmQueue,
        forget_durable_messages: Callable[[], None],
        on_deletion: Callable[[], None] = lambda: None,
        critical_tasks: CriticalTasks | None = None,
    ) -> None:
        self.replayed = threading.Event()  # set when the segments of earlier processes are in the store
        self.moved = 0  # records taken out of the journal since the start, earlier processes' included
        self.replays = 0  # those of earlier processes
        self._journal = journal
        self._store = store  # for alarms and interrupted calls; records go through the store_writer
        self._store_writer = store_writer
        self._metrics = metrics
        self._tools = ToolCallCounters(metrics)
        self._alarm_queue = alarm_queue
        self._forget_durable_messages = forget_durable_messages
        self._on_deletion = on_deletion  # called in this thread
        self._deleted_at = 0.0  # the store's latest deletion that was seen
        self._look_at = 0.0
        self._records_given_up = 0  # records of this process that can never be shipped
        self._done: Counter[int] = Counter()  # by segment of this process: records shipped or given up
        self._position = Position()
        self._marks: deque[tuple[int, float]] = deque(maxlen=100_000)  # (records taken, when)
        self._until = 0.0
        self._stop = threading.Event()
        self._flush_now = threading.Event()  # set where the next batch need not grow
        self._flushed_at = 0.0
        self._waiting = 0  # those who wait for the store to have something
        self._moved = asyncio.Event()  # for them: set after each batch, and a new one put in its place
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = (critical_tasks or CriticalTasks()).make_thread(self._run, "shipper")

    @property
    def backlog(self) -> int:
        """Records of this process that the store does not have yet."""
        lost = self._journal.records_lost + self._records_given_up
        return max(0, self._journal.records_taken - lost - (self.moved - self.replays))

    def shipped_until(self, now: float) -> float:
        """Return the latest known moment before which everything recorded is in the store (Unix seconds).

        To be asked regularly, from the thread that records: each time it notes how much there was at `now`.
        """
        if not self.replayed.is_set():
            return 0.0  # what earlier processes left is not there yet
        self._marks.append((self._journal.records_taken, now))
        done = self._journal.records_taken - self.backlog
        while self._marks and self._marks[0][0] <= done:
            self._until = self._marks.popleft()[1]
        return self._until

    async def start(self) -> None:
        """Begin, where an earlier process stopped. Waits a little for its segments to be shipped."""
        self._position = read_position(self._journal.folder)
        self._store_writer.start()
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        await asyncio.to_thread(self.replayed.wait, 10.0)

    async def stop(self, most_seconds: float = 5.0) -> None:
        """Ship what is there, within `most_seconds`; the rest stays in the journal for the next start."""
        await self.settle(most_seconds)
        self._stop.set()
        self._flush_now.set()
        self._journal.new_records.set()
        await asyncio.to_thread(self._thread.join, most_seconds)
        await asyncio.to_thread(self._store_writer.close)

    def mark(self) -> int:
        """Return what everything recorded so far can be asked for by."""
        return self._journal.records_taken

    def has(self, mark: int) -> bool:
        """Return whether the store has everything up to a mark."""
        return self.replayed.is_set() and self._journal.records_taken - self.backlog >= mark

    async def settle(self, most_seconds: float, mark: int | None = None) -> bool:
        """Wait until the store has everything up to a mark, or recorded so far; return whether it has."""
        mark = self.mark() if mark is None else mark
        if time.monotonic() - self._flushed_at > _HURRY_EVERY:
            self._flushed_at = time.monotonic()
            self._flush_now.set()
        self._waiting += 1
        try:
            async with asyncio.timeout(most_seconds):
                while not self.has(mark) and self._thread.is_alive():
                    await self._moved.wait()
        except TimeoutError:
            pass
        finally:
            self._waiting -= 1
        return self.has(mark)

    def _wake(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    def _run(self) -> None:
        wait, moved = 0.1, 0
        while not self._stop.is_set():
            try:
                busy, failed = self._turn(), False
                wait = 0.1
            except Exception as error:  # noqa: BLE001 -- nothing has moved; whatever it is, it is tried again
                busy, failed = False, True
                self._metrics.ship_failures.inc()
                log.warning("event=ship_failed retry_seconds=%.1f reason=%r", wait, str(error))
            self._alarm_queue.deliver_alarms(self._store)
            if self._waiting and self._loop is not None and not self._stop.is_set():
                self._loop.call_soon_threadsafe(self._wake)
            if failed:
                self._stop.wait(wait)
                wait = min(wait * 2, _LONGEST_WAIT)
            elif not busy:
                self._journal.new_records.wait(1.0)
                self._journal.new_records.clear()
                self._flush_now.wait(_LINGER if self.moved - moved < _MANY else _BUSY_LINGER)
                self._flush_now.clear()
                moved = self.moved

    def _turn(self) -> bool:
        """Ship one batch; return whether there may be more. Raises StoreError, OSError; then nothing has moved."""
        self._look_for_deletions()
        at = self._position
        written = self._journal.segments()
        self._count_lost_segments(written)
        numbers = [n for n in segment_numbers(self._journal.folder) if n >= max(at.segment, 1) and n in written]
        if not numbers:
            self._finish_replay()
            return False
        number = numbers[0]
        ours = number >= self._journal.first_segment
        if ours:
            self._finish_replay()
            at = self._position
        known = number == at.segment and at.offset <= written[number].bytes  # else the position is another journal's
        offset = at.offset if known else 0
        path = segment_path(self._journal.folder, number)
        carried = self._carry(SegmentRange(str(path), offset, written[number].bytes if ours else None))
        self._advance(number, carried)
        self._count(number, carried, ours)
        # Our own segments hold whole records up to where they were written: less than that is damage, too.
        short = ours and (carried.end == "torn" or (carried.end == "more" and not carried.records))
        torn = carried.end == "torn" and next_frame(path, carried.offset + 1) is not None
        if carried.end == "damaged" or short or torn:
            self._set_aside_damage(number, carried.offset, ours)
            return True
        if carried.end == "more":
            return True
        if ours and self._journal.is_current_segment(number):
            return False  # what came meanwhile has rung `fresh`, and waits until it is a batch
        if not ours or self._journal.segments()[number].bytes == carried.offset:
            self._journal.remove_segment(number)
        return True

    def _look_for_deletions(self) -> None:
        """Where something was deleted from the store, messages that were there may be there no more."""
        if time.monotonic() < self._look_at:
            return
        deleted_at = self._store.deletions.latest()
        if deleted_at != self._deleted_at:
            self._forget_durable_messages()
            self._on_deletion()
        self._deleted_at, self._look_at = deleted_at, time.monotonic() + _LOOK_EVERY

    def _count(self, number: int, carried: Carried, ours: bool) -> None:
        if ours:
            self._done[number] += carried.records
        else:
            self.replays += carried.records
        self.moved += carried.records

    def _set_aside_damage(self, number: int, offset: int, ours: bool) -> None:
        """Put a segment that cannot be read on aside, for a person to see; what can be read behind it is shipped."""
        path = segment_path(self._journal.folder, number)
        kept = path.with_suffix(".damaged")
        if ours:  # first: from then on the journal writes to another one
            path.rename(kept)
        self._forget_durable_messages()
        rest = self._behind(kept if ours else path, offset)
        if not ours:
            path.rename(kept)
        for carried in rest:
            self._advance(number, carried)
            self._count(number, carried, ours)
        read = sum(carried.records for carried in rest)
        self._alarm_queue.raise_alarm(
            DAMAGE_ALARM, f"{kept} cannot be read at byte {offset}; {read} records behind it were shipped"
        )

    def _behind(self, path: Path, offset: int) -> list[Carried]:
        """Have carried what can be read behind damage at `offset`. Raises StoreError, OSError."""
        rest: list[Carried] = []
        while (at := next_frame(path, offset + 1)) is not None:
            rest.append(self._carry(SegmentRange(str(path), at, None)))
            while rest[-1].end == "more" and rest[-1].records:
                rest.append(self._carry(SegmentRange(str(path), rest[-1].offset, None)))
            if rest[-1].end == "end":
                break
            offset = rest[-1].offset
        return rest

    def _count_lost_segments(self, segments: Mapping[int, SegmentContent]) -> None:
        """Give up the records whose segment has gone before they were shipped."""
        for number, written in segments.items():
            if segment_path(self._journal.folder, number).exists():
                continue
            missing = written.records - self._done[number]
            if missing > 0:
                self._done[number] = written.records
                self._records_given_up += missing
                self._metrics.lost.inc(missing)
                self._forget_durable_messages()
                self._alarm_queue.raise_alarm(
                    LOSS_ALARM,
                    f"{missing} records of segment {number} in {self._journal.folder} are lost: it was deleted or "
                    f"damaged before the store had them; the runs that they belong to are not complete",
                )
            if not self._journal.is_current_segment(number):
                self._journal.forget_segment(number)

    def _finish_replay(self) -> None:
        """The earlier processes' segments are shipped: what they began and never ended was interrupted."""
        if self.replayed.is_set():
            return
        if self._position.open:
            self._store.calls.mark_interrupted(self._position.open)
            log.info("event=interrupted calls=%d", len(self._position.open))
            self._write_position(msgspec.structs.replace(self._position, open=()))
        self.replayed.set()

    def _carry(self, piece: SegmentRange) -> Carried:
        """Have a piece of the journal carried into the store. Raises StoreError, OSError; then nothing has moved."""
        try:
            carried = self._store_writer.carry(piece)
        except (StoreUnavailable, SchemaMismatch):
            self._metrics.store.report("shipping", ok=False)
            raise
        if carried.records:
            self._metrics.store.report("shipping", ok=True)
            self._metrics.shipped.inc(carried.records)
        self._tools.count(carried.tools)
        for letter in carried.dead:
            log.warning("event=record_refused call=%s reason=%r", letter.call_id, letter.reason)
            self._metrics.dead_letters.inc()
            place = self._journal.folder / DEAD_LETTERS
            self._alarm_queue.raise_alarm(
                DEAD_LETTER_ALARM, f"the store refuses a record of call {letter.call_id}: see {place}"
            )
            self._forget_durable_messages()
        return carried

    def _advance(self, segment: int, carried: Carried) -> None:
        if (segment, carried.offset) == (self._position.segment, self._position.offset):
            return
        still_open = dict.fromkeys((*self._position.open, *carried.started))
        for name in carried.ended:
            still_open.pop(name, None)
        self._write_position(Position(segment, carried.offset, tuple(still_open)))

    def _write_position(self, position: Position) -> None:
        """Keep the position; without a disk in memory only, since shipping again changes nothing."""
        self._position = position
        try:
            write_position(self._journal.folder, position)
        except OSError as error:
            log.warning("event=position_not_written reason=%r", str(error))
