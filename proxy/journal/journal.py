"""The journal: a write-ahead log on local disk. A call is durable here before its client receives the last byte.

Promises:
- `commit` resolves to True only after fdatasync. Commits that wait at the same time share one sync.
- `write` (the begin record of a call) reaches the kernel within `_LINGER_SECONDS`, or with the next commit, without a
  sync of its own. From then on it survives a kill of this process; after the next group commit, a power cut.
- A full or broken disk never fails a call: `commit` resolves to False, the records stay in memory and are retried
  with every batch and every second, and an alarm is active until they are written. Only when that memory
  (`_MAX_UNWRITTEN_BYTES`) is full are the oldest records dropped, and counted.

A journal folder belongs to one proxy (enforced by a file lock). Segments of earlier processes are never appended to.
A process skips a number before its first segment, so that consecutive numbers mean one process; it closes a segment
whole before it creates the next one. Only the last segment of a process can therefore end in a torn record.
`shipper.py` ships segments; `preallocation.py` creates them ahead of time.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from ratchet.proxy.errors import NotReady, ProxyError
from ratchet.proxy.journal.preallocation import SegmentPreallocator, adopt_segment
from ratchet.proxy.journal.segments import (
    MAGIC,
    frame,
    read_position,
    records_end,
    segment_numbers,
    segment_path,
    sync_folder,
    write_all,
)
from ratchet.proxy.journal.write_errors import JournalFull, SegmentGone, remedy
from ratchet.proxy.runtime.critical_tasks import CriticalTasks
from ratchet.proxy.telemetry.alarm_queue import AlarmQueue
from ratchet.proxy.telemetry.metrics import ProxyMetrics
from ratchet.store.records import Shipment

log = logging.getLogger("ratchet.proxy")

ALARM = "proxy_journal"
LOSS_ALARM = "proxy_journal_lost"
_LINGER_SECONDS = 0.002  # how long a record without a waiting call may stay in this process
_MAX_UNWRITTEN_BYTES = 32 * 2**20  # records kept in memory while the disk fails
_PREALLOCATION_TIMEOUT = 1.0  # seconds that the start waits for the first spare segment

_Entry = tuple[bytes, "asyncio.Future[bool] | None"]


@dataclass(slots=True)
class SegmentContent:
    """What a segment holds. Records in segments of earlier processes are not counted."""

    records: int = 0
    bytes: int = 0


class Journal:
    """Append-only segments and the one thread that writes them."""

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        segment_bytes: int,
        metrics: ProxyMetrics,
        alarm_queue: AlarmQueue,
        critical_tasks: CriticalTasks | None = None,
    ) -> None:
        critical_tasks = critical_tasks or CriticalTasks()
        self.folder = folder
        self.first_segment = 1  # of this process
        self.bytes = 0
        self.records_taken = 0  # since the start
        self.records_lost = 0  # dropped because disk and memory were full
        self.new_records = threading.Event()  # set when there is something to ship
        self._max_bytes = max_bytes
        self._segment_bytes = segment_bytes
        self._metrics = metrics
        self._alarm_queue = alarm_queue
        self._pending: list[_Entry] = []  # not handed to the writer yet
        self._hand_over_handle: asyncio.Handle | None = None
        self._flush_scheduled = False
        self._batches: queue.SimpleQueue[list[_Entry] | None] = queue.SimpleQueue()
        self._unwritten: deque[bytes] = deque()
        self._number = 0
        self._file = -1
        self._path = ""
        self._unsynced = False  # the current segment has records written after its last sync
        self._preallocator = SegmentPreallocator(folder, segment_bytes, critical_tasks)
        self._segments: dict[int, SegmentContent] = {}
        self._state_lock = threading.Lock()  # guards number, file, segments and bytes, which the shipper reads
        self._lock_file = -1
        self._writer_died = False
        self._thread = critical_tasks.make_thread(self._run, "journal")
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """Lock the folder and start writing. Raises ProxyError if it is unusable or belongs to another proxy."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock_file = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            adopt_segment(self.folder, segment_path(self.folder, self._next_first_segment()))
            ends = {number: records_end(segment_path(self.folder, number)) for number in segment_numbers(self.folder)}
        except BlockingIOError:
            raise ProxyError(
                f"journal {self.folder} is in use by another proxy: give this one another --journal folder"
            ) from None
        except OSError as error:
            raise ProxyError(
                f"journal {self.folder} cannot be used: {error}; give a writable --journal folder"
            ) from error
        self._segments = {number: SegmentContent(0, end) for number, end in ends.items()}
        self.bytes = sum(ends.values())
        self.first_segment = self._next_first_segment()
        self._number = self.first_segment - 1
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._preallocator.start, _PREALLOCATION_TIMEOUT)
        self._thread.start()

    def _next_first_segment(self) -> int:
        """Return the number of a new process's first segment: not the successor of any that the folder has or had."""
        last = max([*segment_numbers(self.folder), read_position(self.folder).segment])
        return last + 2 if last else 1

    async def stop(self) -> None:
        """Write and sync the remaining records, then release the folder. What the disk does not take is `unwritten`."""
        self._hand_over()
        self._batches.put(None)
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._preallocator.stop)
        os.close(self._lock_file)

    @property
    def unwritten(self) -> Sequence[bytes]:
        """The frames that the disk did not take; call it after `stop`."""
        return tuple(self._unwritten)

    def write(self, record: Shipment) -> None:
        """Append a record without waiting."""
        assert self._loop is not None, "start() comes first"
        self._pending.append((frame(record), None))
        self.records_taken += 1
        if self._hand_over_handle is None:
            self._hand_over_handle = self._loop.call_later(_LINGER_SECONDS, self._hand_over)

    def commit(self, record: Shipment) -> asyncio.Future[bool]:
        """Append a record; the future resolves to whether it is durable."""
        assert self._loop is not None, "start() comes first"
        future: asyncio.Future[bool] = self._loop.create_future()
        self._pending.append((frame(record), future))
        self.records_taken += 1
        if not self._flush_scheduled:  # other calls that end in this iteration of the loop join the batch
            self._flush_scheduled = True
            if self._hand_over_handle is not None:
                self._hand_over_handle.cancel()
            self._hand_over_handle = self._loop.call_soon(self._hand_over)
        return future

    def _hand_over(self) -> None:
        """Pass the pending records to the writer thread."""
        if self._pending:
            self._batches.put(self._pending)
            if self._writer_died:
                self._fail_futures(self._pending)
            self._pending = []
        self._hand_over_handle, self._flush_scheduled = None, False

    def is_current_segment(self, number: int) -> bool:
        """Return whether records are appended to this segment."""
        with self._state_lock:
            return number == self._number and self._file >= 0

    def segments(self) -> dict[int, SegmentContent]:
        """Return the content of each segment, up to its last written record."""
        with self._state_lock:
            return {number: SegmentContent(one.records, one.bytes) for number, one in self._segments.items()}

    def remove_segment(self, number: int) -> None:
        """Delete a segment that has been shipped. Raises OSError."""
        segment_path(self.folder, number).unlink(missing_ok=True)
        self.forget_segment(number)

    def forget_segment(self, number: int) -> None:
        """Stop counting a segment whose file no longer exists."""
        with self._state_lock:
            segment = self._segments.pop(number, None)
            self.bytes -= segment.bytes if segment else 0

    # --- the writer's thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        batch: list[_Entry] = []
        try:
            self._write_until_stopped(batch)
        except BaseException:
            self._writer_died = True
            self._fail_futures(batch)
            while not self._batches.empty():
                self._fail_futures(self._batches.get_nowait() or ())
            raise

    def _write_until_stopped(self, batch: list[_Entry]) -> None:
        """Write batches until the stop marker; `batch` always holds the entries being written."""
        running = True
        while running:
            batch.clear()
            try:
                entries = self._batches.get(timeout=1.0 if self._unwritten else None)
                while entries is not None:
                    batch += entries
                    entries = self._batches.get_nowait()
                running = False
            except queue.Empty:
                pass
            if batch or self._unwritten:
                self._write_batch(batch)
        self._close()

    def _write_batch(self, batch: Sequence[_Entry]) -> None:
        """Write one batch; sync it if a call waits for it."""
        waiting = [future for _, future in batch if future is not None]
        frames = [*self._unwritten, *(data for data, _ in batch)]
        try:
            while frames:
                count = self._count_that_fit(frames)
                self._append(frames[:count], sync=bool(waiting))
                del frames[:count]
        except OSError as error:
            self._metrics.journal_errors.inc()
            self._alarm_queue.raise_alarm(
                ALARM,
                f"the journal {self.folder} cannot be written: {error}; calls are served, their records stay in "
                f"memory: {remedy(error)}",
            )
            if not self._undo_write():
                self._close()
            self._keep_unwritten(frames)
            self._resolve(waiting, durable=False)
            return
        if self._unwritten:
            self._unwritten.clear()
            self._alarm_queue.clear_alarm(ALARM)
        self._resolve(waiting, durable=True)
        self.new_records.set()

    def _count_that_fit(self, frames: Sequence[bytes]) -> int:
        """Return how many of these frames fit into the journal now, at least one. Raises OSError if it is full."""
        with self._state_lock:
            size, empty = self.bytes, not self._segments
        sizes = accumulate((len(data) for data in frames), initial=size)
        count = sum(size <= self._max_bytes for size in sizes) - 1
        if count < 1 and not empty:  # an empty journal takes a record of any size: it would wait for ever
            raise JournalFull(f"it holds {size} bytes of at most {self._max_bytes}")
        return max(1, count)

    def _append(self, frames: Sequence[bytes], sync: bool) -> None:
        data = b"".join(frames)
        if self._file >= 0 and not os.path.exists(self._path):
            raise SegmentGone("its segment was moved or deleted")
        if self._file >= 0 and len(MAGIC) < self._size() > self._segment_bytes - len(data):
            self._close()
        if self._file < 0:
            self._open()
        self._unsynced = True
        write_all(self._file, data, self._size())
        if sync:
            began = time.perf_counter()
            os.fdatasync(self._file)
            self._unsynced = False
            self._metrics.commit_seconds.observe(time.perf_counter() - began)
        with self._state_lock:
            segment = self._segments.setdefault(self._number, SegmentContent())
            segment.records += len(frames)
            segment.bytes += len(data)
            self.bytes += len(data)
        self._preallocator.request_segment()

    def _size(self) -> int:
        """Return the bytes of the current segment up to its last written record."""
        with self._state_lock:
            segment = self._segments.get(self._number)
            return segment.bytes if segment else 0

    def _open(self) -> None:
        """Open the next segment; its name is durable before its content counts."""
        self.folder.mkdir(parents=True, exist_ok=True)
        number = self._number + 1
        path = segment_path(self.folder, number)
        file = self._preallocator.take_segment(path)
        if file is None:  # no spare segment: this one grows as it is written
            file = _create_segment(path)
        with self._state_lock:
            self._file, self._number, self._path = file, number, str(path)
            self._segments[number] = SegmentContent(0, len(MAGIC))
            self.bytes += len(MAGIC)

    def _undo_write(self) -> bool:
        """Remove what a failed write left in the segment; return whether the next write can use it: it has no records.

        Not left to the pre-allocation's thread: a kill before it would leave a torn record, and a later segment.
        """
        if self._file < 0 or not os.path.exists(self._path):
            return False
        size = self._size()
        try:
            os.ftruncate(self._file, size)
        except OSError:
            return False
        return size == len(MAGIC)

    def _close(self) -> None:
        """Close the current segment; truncate zeros or a torn record after its last complete one."""
        if self._file < 0:
            return
        size = self._size()
        with self._state_lock:
            file, self._file = self._file, -1
        try:
            if self._unsynced:
                os.fdatasync(file)
        except OSError as error:
            log.warning("event=journal_close_failed reason=%r", str(error))
        self._preallocator.truncate_segment(file, size)

    def _keep_unwritten(self, frames: Sequence[bytes]) -> None:
        """Keep frames for the next attempt; drop the oldest ones above the memory limit."""
        self._unwritten = deque(frames)
        size, before = sum(map(len, frames)), self.records_lost
        while size > _MAX_UNWRITTEN_BYTES:
            size -= len(self._unwritten.popleft())
            self.records_lost += 1
            self._metrics.lost.inc()
        if self.records_lost > before:
            self._alarm_queue.raise_alarm(
                LOSS_ALARM,
                f"{self.records_lost} records of the journal {self.folder} are lost since the start, because the "
                f"memory for records that cannot be written is full: see the alarm {ALARM}",
            )

    def _fail_futures(self, entries: Sequence[_Entry]) -> None:
        """Fail the calls that wait for these entries, which nothing will write."""
        waiting = [future for _, future in entries if future is not None]
        if waiting and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_set_writer_died, waiting)

    def _resolve(self, waiting: Sequence[asyncio.Future[bool]], durable: bool) -> None:
        if not waiting or self._loop is None or self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(_set_results, waiting, durable)


def _create_segment(path: Path) -> int:
    """Return the open file of a new segment whose name is durable. Raises OSError."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        write_all(file, MAGIC, 0)
        sync_folder(path.parent)
    except OSError:
        os.close(file)
        path.unlink(missing_ok=True)
        raise
    return file


def _set_writer_died(waiting: Sequence[asyncio.Future[bool]]) -> None:
    for future in waiting:
        if not future.done():
            future.set_exception(NotReady("the journal writer died and this proxy is stopping: retry the request"))
            future.exception()  # marks it as retrieved: the call may no longer be waiting


def _set_results(waiting: Sequence[asyncio.Future[bool]], durable: bool) -> None:
    for future in waiting:
        if not future.done():
            future.set_result(durable)
