"""The journal: what was answered is on this disk before the client sees the end of it.

Promises:
- `commit` resolves to True only after fdatasync; all that wait at the same time share one.
- `write` (the beginning of a call) reaches the kernel within `_LINGER`, or with the next commit, without a sync of its
  own: from then on it survives a kill of this process, and a power cut from the next group commit on.
- A full or broken disk never fails a call: `commit` resolves to False, the records are held in memory and tried
  again with every batch and every second, and an alarm stands until they are written. Only when that memory
  (`_MOST_HELD`) is full as well are the oldest given up, and counted.

One folder belongs to one proxy (a lock says so). Old segments are never appended to. Shipping is `shipper.py`; segments
made beforehand are `blank.py`'s.
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

from ratchet.proxy.errors import NotReady, StartError
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
from ratchet.proxy.runtime.critical_tasks import CriticalTasks
from ratchet.proxy.telemetry.alarm_queue import AlarmQueue
from ratchet.proxy.telemetry.metrics import Metrics
from ratchet.store.records import Shipment

log = logging.getLogger("ratchet.proxy")

ALARM = "proxy_journal"
_LINGER = 0.002  # seconds that a record which nobody waits for may stay in this process
_MOST_HELD = 32 * 2**20  # bytes of records in memory while the disk fails
_FIRST_BLANK = 1.0  # seconds that the start waits for the first segment's blocks at most

_Entry = tuple[bytes, "asyncio.Future[bool] | None"]


@dataclass(slots=True)
class SegmentContent:
    """What a segment holds. The records of earlier processes' segments are not counted."""

    records: int = 0
    bytes: int = 0


class Journal:
    """Append-only segments and the one thread that writes them."""

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        journal_segment_bytes: int,
        metrics: Metrics,
        alarm_queue: AlarmQueue,
        critical_tasks: CriticalTasks | None = None,
    ) -> None:
        critical_tasks = critical_tasks or CriticalTasks()
        self.folder = folder
        self.first_segment = 1  # the first segment of this process; older ones are another's
        self.bytes = 0
        self.records_taken = 0  # records since the start
        self.records_lost = 0  # those given up
        self.new_records = threading.Event()  # set when there is something to ship
        self._most_bytes = max_bytes
        self._segment_bytes = journal_segment_bytes
        self._metrics = metrics
        self._alarm_queue = alarm_queue
        self._taken: list[_Entry] = []  # not handed to the writer yet
        self._handing: asyncio.Handle | None = None  # when they will be
        self._flush_scheduled = False
        self._batches: queue.SimpleQueue[list[_Entry] | None] = queue.SimpleQueue()
        self._held: deque[bytes] = deque()
        self._held_bytes = 0
        self._number = 0
        self._file = -1
        self._path = ""
        self._unsynced = False  # whether the current segment has records that no sync followed
        self._preallocator = SegmentPreallocator(folder, journal_segment_bytes, critical_tasks)
        self._written: dict[int, SegmentContent] = {}  # the segments that are there
        self._place = threading.Lock()  # guards number, file, written and bytes, which the shipper reads
        self._lock = -1
        self._dead = False  # nobody writes any more
        self._thread = critical_tasks.make_thread(self._run, "journal")
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """Take the folder and begin. Raises StartError where it cannot be used or another proxy has it."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            adopt_segment(self.folder, segment_path(self.folder, self._latest() + 1))
            ends = {number: records_end(segment_path(self.folder, number)) for number in segment_numbers(self.folder)}
        except BlockingIOError:
            raise StartError(
                f"journal {self.folder} is in use by another proxy: give this one another --journal folder"
            ) from None
        except OSError as error:
            raise StartError(
                f"journal {self.folder} cannot be used: {error}; give a writable --journal folder"
            ) from error
        self._written = {number: SegmentContent(0, end) for number, end in ends.items()}
        self.bytes = sum(written.bytes for written in self._written.values())
        self._number = self._latest()
        self.first_segment = self._number + 1
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._preallocator.start, _FIRST_BLANK)
        self._thread.start()

    def _latest(self) -> int:
        """Return the highest number that a segment here has or had."""
        return max([*segment_numbers(self.folder), read_position(self.folder).segment])

    async def stop(self) -> None:
        """Write and sync what is left, and let go of the folder."""
        self._hand_over()
        self._batches.put(None)
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._preallocator.stop)
        os.close(self._lock)

    def write(self, record: Shipment) -> None:
        """Append without waiting."""
        assert self._loop is not None, "start() comes first"
        self._taken.append((frame(record), None))
        self.records_taken += 1
        if self._handing is None:
            self._handing = self._loop.call_later(_LINGER, self._hand_over)

    def commit(self, record: Shipment) -> asyncio.Future[bool]:
        """Append; the future says whether it is durable."""
        assert self._loop is not None, "start() comes first"
        future: asyncio.Future[bool] = self._loop.create_future()
        self._taken.append((frame(record), future))
        self.records_taken += 1
        if not self._flush_scheduled:  # what else ends in this turn of the loop goes along
            self._flush_scheduled = True
            if self._handing is not None:
                self._handing.cancel()
            self._handing = self._loop.call_soon(self._hand_over)
        return future

    def _hand_over(self) -> None:
        """Give the writer what was taken."""
        if self._taken:
            self._batches.put(self._taken)
            if self._dead:
                self._refuse(self._taken)
            self._taken = []
        self._handing, self._flush_scheduled = None, False

    def is_current_segment(self, number: int) -> bool:
        """Return whether this segment is the one that records are appended to."""
        with self._place:
            return number == self._number and self._file >= 0

    def written(self) -> dict[int, SegmentContent]:
        """Return what each segment holds up to and with its last written record."""
        with self._place:
            return {number: SegmentContent(written.records, written.bytes) for number, written in self._written.items()}

    def remove(self, number: int) -> None:
        """Delete a segment that has been shipped. Raises OSError."""
        segment_path(self.folder, number).unlink(missing_ok=True)
        self.forget(number)

    def forget(self, number: int) -> None:
        """Count a segment no longer: its file has gone."""
        with self._place:
            written = self._written.pop(number, None)
            self.bytes -= written.bytes if written else 0

    # --- the writer's thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        batch: list[_Entry] = []
        try:
            self._write_until_stopped(batch)
        except BaseException:
            self._dead = True
            self._refuse(batch)
            while not self._batches.empty():
                self._refuse(self._batches.get_nowait() or ())
            raise

    def _write_until_stopped(self, batch: list[_Entry]) -> None:
        """Write what comes until the end; what is being written is in `batch`."""
        going = True
        while going:
            batch.clear()
            try:
                entries = self._batches.get(timeout=1.0 if self._held else None)
                while entries is not None:
                    batch += entries
                    entries = self._batches.get_nowait()
                going = False
            except queue.Empty:
                pass
            if batch or self._held:
                self._turn(batch)
        self._close()

    def _turn(self, batch: Sequence[_Entry]) -> None:
        """Write one batch, with a sync where someone waits for it."""
        waiting = [future for _, future in batch if future is not None]
        frames = [*self._held, *(data for data, _ in batch)]
        try:
            while frames:
                count = self._fitting(frames)
                self._append(frames[:count], sync=bool(waiting))
                del frames[:count]
        except OSError as error:
            self._metrics.journal_errors.inc()
            self._alarm_queue.raise_alarm(
                ALARM,
                f"the journal {self.folder} cannot be written: {error}; calls go on, their records wait in memory: "
                f"free space on that disk or raise max_journal_bytes",
            )
            self._close()
            self._hold(frames)
            self._resolve(waiting, durable=False)
            return
        if self._held:
            self._held.clear()
            self._held_bytes = 0
            self._alarm_queue.clear_alarm(ALARM)
        self._resolve(waiting, durable=True)
        self.new_records.set()

    def _fitting(self, frames: Sequence[bytes]) -> int:
        """Return how many of these frames the journal takes now, at least one. Raises OSError where it is full."""
        with self._place:
            held, empty = self.bytes, not self._written
        sizes = accumulate((len(data) for data in frames), initial=held)
        count = sum(size <= self._most_bytes for size in sizes) - 1
        if count < 1 and not empty:  # an empty journal takes a record of any size: it would wait for ever
            raise OSError(f"it holds {held} bytes of at most {self._most_bytes}")
        return max(1, count)

    def _append(self, frames: Sequence[bytes], sync: bool) -> None:
        data = b"".join(frames)
        if self._file >= 0 and not os.path.exists(self._path):
            raise OSError("its segment was moved or deleted")
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
        with self._place:
            written = self._written.setdefault(self._number, SegmentContent())
            written.records += len(frames)
            written.bytes += len(data)
            self.bytes += len(data)
        self._preallocator.want()

    def _size(self) -> int:
        """Return the bytes of the current segment up to and with its last written record."""
        with self._place:
            written = self._written.get(self._number)
            return written.bytes if written else 0

    def _open(self) -> None:
        """Begin the next segment; its name is durable before its content counts."""
        self.folder.mkdir(parents=True, exist_ok=True)
        number = self._number + 1
        path = segment_path(self.folder, number)
        file = self._preallocator.take(path)
        if file is None:  # then it grows
            file = _begun(path)
        with self._place:
            self._file, self._number, self._path = file, number, str(path)
            self._written[number] = SegmentContent(0, len(MAGIC))
            self.bytes += len(MAGIC)

    def _close(self) -> None:
        """End the current segment; what stands behind its last good record, zeros or a torn one, is cut off."""
        if self._file < 0:
            return
        size = self._size()
        with self._place:
            file, self._file = self._file, -1
        try:
            if self._unsynced:
                os.fdatasync(file)
        except OSError as error:
            log.warning("event=journal_close_failed reason=%r", str(error))
        self._preallocator.cut(file, size)

    def _hold(self, frames: Sequence[bytes]) -> None:
        self._held = deque(frames)
        self._held_bytes = sum(map(len, frames))
        while self._held_bytes > _MOST_HELD:
            self._held_bytes -= len(self._held.popleft())
            self.records_lost += 1
            self._metrics.lost.inc()

    def _refuse(self, entries: Sequence[_Entry]) -> None:
        """Nobody will write these: what was not answered yet must not be."""
        waiting = [future for _, future in entries if future is not None]
        if waiting and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_fail, waiting)

    def _resolve(self, waiting: Sequence[asyncio.Future[bool]], durable: bool) -> None:
        if not waiting or self._loop is None or self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(_settle, waiting, durable)


def _begun(path: Path) -> int:
    """Return the open file of a new segment, whose name is durable. Raises OSError."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        write_all(file, MAGIC, 0)
        sync_folder(path.parent)
    except OSError:
        os.close(file)
        path.unlink(missing_ok=True)
        raise
    return file


def _fail(waiting: Sequence[asyncio.Future[bool]]) -> None:
    for future in waiting:
        if not future.done():
            future.set_exception(NotReady("the journal's writer died, and this proxy ends: send the request again"))
            future.exception()  # nobody may be waiting any more


def _settle(waiting: Sequence[asyncio.Future[bool]], durable: bool) -> None:
    for future in waiting:
        if not future.done():
            future.set_result(durable)
