"""Ships the journal to the store, in order and with retries, and keeps the position.

The beginning of a call waits for its end (`held_beginnings.py`), unless a request waits for the store.

Promises: a record is removed from the journal only after the store has it. While the store is down nothing is lost, and
no call waits for it. A rejected record (a dead letter of `store_writer.py`) increments a counter and raises an alarm.
After a deletion in the store the recorder is notified within about a second, before the next batch. Records whose
segment was deleted or is damaged are counted as lost and raise an alarm; the recorder then writes all messages again,
and `store.trajectories.incomplete` finds calls that were recorded without some of theirs. Calls that an earlier proxy
process started and never ended become `interrupted` once its segments are shipped.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from ratchet.proxy.coordinator.shipping.held_beginnings import HOLD_SECONDS, HeldBeginnings
from ratchet.proxy.coordinator.shipping.store_writer import DEAD_LETTERS, SegmentRange, StoreWriter, WriteResult
from ratchet.proxy.coordinator.tool_checks.checker import ToolCallCounters
from ratchet.proxy.journal.journal import LOSS_ALARM, Journal, SegmentContent
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
from ratchet.store.errors import StoreError
from ratchet.store.store import Store

log = logging.getLogger("ratchet.proxy")

DEAD_LETTER_ALARM = "proxy_dead_letters"
DAMAGE_ALARM = "proxy_journal_damaged"
_LINGER = 0.1  # seconds to let a batch grow after a pause
_SPACING = 0.3  # seconds between two batches: each costs as much as 12 calls
_MAX_RETRY_SECONDS = 5.0  # between attempts while the store is down
_FLUSH_INTERVAL = 1.0  # seconds between batches that are written early because a request waits for one
_DELETION_CHECK_INTERVAL = 1.0  # seconds; `store.deletion` relies on it


class Shipper:
    """The thread that moves records from the journal to the store."""

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
        hold_seconds: float = HOLD_SECONDS,
    ) -> None:
        self.replayed = threading.Event()  # set when the segments of earlier processes are in the store
        self.shipped = 0  # records since the start, those of earlier processes included
        self.replays = 0  # shipped records of earlier processes
        self._journal = journal
        self._store = store  # for alarms and interrupted calls; records go through the store writer
        self._store_writer = store_writer
        self._metrics = metrics
        self._tools = ToolCallCounters(metrics)
        self._alarm_queue = alarm_queue
        self._forget_durable_messages = forget_durable_messages
        self._on_deletion = on_deletion  # called in this thread
        self._deleted_at = 0.0  # the latest known deletion in the store
        self._next_deletion_check = 0.0
        self._records_given_up = 0  # records of this process that can never be shipped
        self._done: Counter[int] = Counter()  # by segment of this process: records shipped or given up
        self._position = Position()  # of the next range to read
        self._stored_position = Position()
        self._held = HeldBeginnings(hold_seconds)  # of the current segment
        self._stored_in_order = 0  # records of this process before the first one that the store does not have
        self._marks: deque[tuple[int, float]] = deque(maxlen=100_000)  # (records taken, when)
        self._until = 0.0
        self._stop = threading.Event()
        self._flush_now = threading.Event()  # the next batch need not grow
        self._flushed_at = 0.0
        self._waiting = 0  # requests that wait for records to be shipped
        self._batch_done = asyncio.Event()  # set after each batch, then replaced
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = (critical_tasks or CriticalTasks()).make_thread(self._run, "shipper")

    @property
    def backlog(self) -> int:
        """Records of this process that the store does not have yet."""
        return max(0, self._journal.records_taken - self.lost - (self.shipped - self.replays))

    @property
    def lost(self) -> int:
        """Records of this process that the store will never have: disk and memory were full, or a segment is gone."""
        return self._journal.records_lost + self._records_given_up

    @property
    def is_behind(self) -> bool:
        """Whether the store lacks records of earlier processes."""
        first = self._journal.first_segment
        return not self.replayed.is_set() and any(one < first for one in segment_numbers(self._journal.folder))

    def shipped_until(self, now: float) -> float:
        """Return the latest known moment before which everything recorded is in the store (Unix seconds).

        Call it regularly, from the recording thread: each call notes how many records there were at `now`.
        """
        if not self.replayed.is_set():
            return 0.0  # records of earlier processes are missing
        self._marks.append((self._journal.records_taken, now))
        while self._marks and self._marks[0][0] <= self._done_in_order:
            self._until = self._marks.popleft()[1]
        return self._until

    @property
    def _done_in_order(self) -> int:
        """The records of this process, lost ones included, before the first one that is to be stored yet."""
        return self.lost + self._stored_in_order

    async def start(self) -> None:
        """Continue where an earlier process stopped. Waits a little for its segments to be shipped."""
        self._position = self._stored_position = read_position(self._journal.folder)
        self._store_writer.start()
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        await asyncio.to_thread(self.replayed.wait, 10.0)

    async def stop(self, timeout_seconds: float = 5.0) -> None:
        """Ship what is there, within `timeout_seconds`; the rest stays in the journal for the next start."""
        await self.settle(timeout_seconds)
        self._stop.set()
        self._flush_now.set()
        self._journal.new_records.set()
        await asyncio.to_thread(self._thread.join, timeout_seconds)
        await asyncio.to_thread(self._store_writer.close)

    def mark(self) -> int:
        """Return a mark for everything recorded so far."""
        return self._journal.records_taken

    def has(self, mark: int) -> bool:
        """Return whether the store has everything up to a mark."""
        return self.replayed.is_set() and self._done_in_order >= mark

    async def settle(self, timeout_seconds: float, mark: int | None = None) -> bool:
        """Wait until the store has everything up to a mark, or recorded so far; return whether it has."""
        mark = self.mark() if mark is None else mark
        if time.monotonic() - self._flushed_at > _FLUSH_INTERVAL:
            self._flushed_at = time.monotonic()
            self._flush_now.set()
        self._waiting += 1
        if not self.has(mark):
            self._journal.new_records.set()  # beginnings that wait are written, although there may be nothing new
        try:
            async with asyncio.timeout(timeout_seconds):
                while not self.has(mark) and self._thread.is_alive():
                    await self._batch_done.wait()
        except TimeoutError:
            pass
        finally:
            self._waiting -= 1
        return self.has(mark)

    def _wake(self) -> None:
        done, self._batch_done = self._batch_done, asyncio.Event()
        done.set()

    def _run(self) -> None:
        wait, batch_at = 0.1, 0.0
        while not self._stop.is_set():
            try:
                shipped = self.shipped
                busy, failed = self._ship_batch(), False
                batch_at = time.monotonic() if self.shipped > shipped else batch_at
                wait = 0.1
            except Exception as error:  # noqa: BLE001 -- the position is unchanged; retry
                busy, failed = False, True
                self._metrics.ship_failures.inc()
                if isinstance(error, StoreError):
                    self._metrics.store.report("shipping", ok=False)
                log.warning("event=ship_failed retry_seconds=%.1f reason=%r", wait, str(error))
            self._alarm_queue.deliver_alarms(self._store)
            if self._waiting and self._loop is not None and not self._stop.is_set():
                self._loop.call_soon_threadsafe(self._wake)
            if failed:
                self._stop.wait(wait)
                wait = min(wait * 2, _MAX_RETRY_SECONDS)
            elif not busy:
                self._journal.new_records.wait(1.0)
                self._journal.new_records.clear()
                self._flush_now.wait(max(_LINGER, batch_at + _SPACING - time.monotonic()))
                self._flush_now.clear()

    def _ship_batch(self) -> bool:
        """Ship one batch; return whether there may be more. Raises StoreError, OSError, without effect."""
        self._check_deletions()
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
        known = number == at.segment and at.offset <= written[number].bytes  # else it is another journal's
        offset = at.offset if known else 0
        path = segment_path(self._journal.folder, number)
        holds = ours and self._journal.is_current_segment(number) and not self._waiting
        held = self._held.offsets()
        due = self._held.due(time.monotonic()) if holds else frozenset(held)
        until = written[number].bytes if ours else None
        result = self._write(SegmentRange(str(path), offset, until, holds, held, due))
        self._note(number, result, due, ours=ours)
        # Our own segments contain complete records up to the written length: fewer are damage too.
        short = ours and (result.end == "torn" or (result.end == "more" and not result.records))
        # A crash tears the end of a process's last segment; one with a successor of that process was closed whole.
        torn = result.end == "torn" and (number + 1 in written or next_frame(path, result.offset + 1) is not None)
        if result.end == "damaged" or short or torn:
            self._set_aside_damage(number, result.offset, ours)
            return True
        if result.end == "more":
            return True
        if ours and self._journal.is_current_segment(number):
            return False  # later records have set `new_records`; let them grow into a batch
        if len(self._held):
            return True  # this was the current segment a moment ago
        if not ours or self._journal.segments()[number].bytes == result.offset:
            self._journal.remove_segment(number)
        return True

    def _check_deletions(self) -> None:
        """Notify the recorder of deletions in the store: stored messages may be gone."""
        if time.monotonic() < self._next_deletion_check:
            return
        deleted_at = self._store.deletions.latest()
        if deleted_at != self._deleted_at:
            self._forget_durable_messages()
            self._on_deletion()
        self._deleted_at, self._next_deletion_check = deleted_at, time.monotonic() + _DELETION_CHECK_INTERVAL

    def _note(self, number: int, result: WriteResult, written: Iterable[str] = (), *, ours: bool) -> None:
        """Count what was written, and store the position. `written`: calls whose beginnings had waited."""
        stored = result.records
        if ours:
            stored = self._held.note(result, written, time.monotonic())
            self._done[number] += stored
        else:
            self.replays += stored
        self.shipped += stored
        self._metrics.shipped.inc(stored)
        self._advance(number, result)
        self._stored_in_order = self._held.stored_in_order

    def _set_aside_damage(self, number: int, offset: int, ours: bool) -> None:
        """Rename a damaged segment for a person to inspect, and ship the readable records after the damage."""
        path = segment_path(self._journal.folder, number)
        damaged = path.with_suffix(".damaged")
        if ours:  # first: the journal then writes to a new segment
            path.rename(damaged)
        self._forget_durable_messages()
        held = self._held.offsets()
        rest = self._ship_after_damage(damaged if ours else path, offset, held)
        if not ours:
            path.rename(damaged)
        for result in rest:
            self._note(number, result, held, ours=ours)
        read = sum(result.records for result in rest)
        log.error("event=segment_damaged path=%s byte=%d shipped_after=%d", damaged, offset, read)
        kept = sorted(path.parent.glob("*.damaged"))
        self._alarm_queue.raise_alarm(
            DAMAGE_ALARM,
            f"damaged journal segments in {path.parent}: {len(kept)}, the first is {kept[0].name}. {damaged.name} "
            f"cannot be read at byte {offset}; {read} records after it were shipped, others may be lost, then calls "
            f"are missing or `interrupted`: check that disk; no command ships the rest of these files",
        )

    def _ship_after_damage(self, path: Path, offset: int, held: Mapping[str, int]) -> list[WriteResult]:
        """Ship the beginnings that wait, and what is readable after damage at `offset`. Raises StoreError, OSError."""
        rest = [self._write(SegmentRange(str(path), offset, offset, held=held, due=frozenset(held)))] if held else []
        while (at := next_frame(path, offset + 1)) is not None:
            rest.append(self._write(SegmentRange(str(path), at, None)))
            while rest[-1].end == "more" and rest[-1].records:
                rest.append(self._write(SegmentRange(str(path), rest[-1].offset, None)))
            if rest[-1].end == "end":
                break
            offset = rest[-1].offset
        return rest

    def _count_lost_segments(self, segments: Mapping[int, SegmentContent]) -> None:
        """Count the unshipped records of deleted segments as lost."""
        for number, written in segments.items():
            if segment_path(self._journal.folder, number).exists():
                continue
            missing = written.records - self._done[number]
            if number == self._position.segment:
                self._held.forget()  # they are among the missing
                self._stored_in_order = self._held.stored_in_order
            if missing > 0:
                self._done[number] = written.records
                self._records_given_up += missing
                self._metrics.lost.inc(missing)
                self._forget_durable_messages()
                self._alarm_queue.raise_alarm(
                    LOSS_ALARM,
                    f"{missing} records of segment {number} in {self._journal.folder} are lost: it was deleted or "
                    f"damaged before the store had them; their trajectories are incomplete",
                )
            if not self._journal.is_current_segment(number):
                self._journal.forget_segment(number)

    def _finish_replay(self) -> None:
        """Mark the open calls of earlier processes as interrupted, once their segments are shipped."""
        if self.replayed.is_set():
            return
        if self._position.open:
            self._store.calls.mark_interrupted(self._position.open)
            log.info("event=interrupted calls=%d", len(self._position.open))
            self._write_position(msgspec.structs.replace(self._position, open=()))
        self.replayed.set()

    def _write(self, segment: SegmentRange) -> WriteResult:
        """Write a range of the journal into the store. Raises StoreError, OSError; then the position is unchanged."""
        result = self._store_writer.write(segment)
        if result.records:
            self._metrics.store.report("shipping", ok=True)
        self._tools.count(result.tools)
        for letter in result.dead:
            log.warning("event=record_rejected call=%s reason=%r", letter.call_id, letter.reason)
            self._metrics.dead_letters.inc()
            place = self._journal.folder / DEAD_LETTERS
            self._alarm_queue.raise_alarm(
                DEAD_LETTER_ALARM, f"the store rejected a record of call {letter.call_id}: see {place}"
            )
            self._forget_durable_messages()
        return result

    def _advance(self, segment: int, result: WriteResult) -> None:
        open_calls = dict.fromkeys((*self._position.open, *result.started))
        for name in result.ended:
            open_calls.pop(name, None)
        self._write_position(Position(segment, result.offset, tuple(open_calls)))

    def _write_position(self, position: Position) -> None:
        """Store the position; if the disk fails only in memory, because shipping a record again changes nothing."""
        self._position, first = position, self._held.offset
        stored = position if first is None else msgspec.structs.replace(position, offset=first)
        if stored == self._stored_position:
            return
        try:
            write_position(self._journal.folder, stored)
            self._stored_position = stored
        except OSError as error:
            log.warning("event=position_not_written reason=%r", str(error))
