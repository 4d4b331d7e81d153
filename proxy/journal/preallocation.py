"""Pre-allocates the next journal segment, so that a sync of records writes no file metadata.

Promises:
- A pre-allocated segment is durable under its temporary name, filled with zeros, before `take_segment` returns it.
- Nothing here fails or delays a call. If the disk is short of space or broken, there is no spare segment and the
  journal's segments grow as they are written.
- At most one spare segment exists. `max_journal_bytes` does not count its zeros.

The rename in `take_segment` is not synced: after a power cut the records may be in the file with the temporary name.
`adopt_segment` finds them there.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from pathlib import Path

from ratchet.proxy.journal.segments import MAGIC, records_end, sync_folder, write_all
from ratchet.proxy.runtime.critical_tasks import CriticalTasks

log = logging.getLogger("ratchet.proxy")

_NAME = "next.blank"
_CHUNK = bytes(2**18)
_MIN_FREE_SEGMENTS = 8  # no spare segment if the disk has less free space than this many segments


def adopt_segment(folder: Path, segment: Path) -> None:
    """Rename the spare file of an earlier process to `segment` if it holds records. Raises OSError."""
    spare = folder / _NAME
    if spare.is_file() and records_end(spare) > len(MAGIC):
        spare.rename(segment)


class SegmentPreallocator:
    """Creates spare segments, and truncates used ones to their records, in its own thread."""

    def __init__(self, folder: Path, size: int, critical_tasks: CriticalTasks) -> None:
        self._folder = folder
        self._size = size
        self._spare: queue.SimpleQueue[int] = queue.SimpleQueue()  # the descriptor of the spare segment
        self._jobs: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._requested = threading.Event()  # set while a spare segment is being created
        self._attempted = threading.Event()  # set when the latest request succeeded or failed
        self._is_failing = False  # the latest request failed: logged once
        self._thread = critical_tasks.make_thread(self._run, "journal-preallocation")

    @property
    def _path(self) -> Path:
        return self._folder / _NAME

    def start(self, timeout_seconds: float) -> None:
        """Create the first spare segment; wait for it up to `timeout_seconds`."""
        self._thread.start()
        self.request_segment()
        self._attempted.wait(timeout_seconds)

    def stop(self) -> None:
        """Finish the queued jobs and delete the spare segment."""
        self._jobs.put(None)
        self._thread.join()
        self._delete_spare()

    def request_segment(self) -> None:
        """Request a spare segment if there is none. Never blocks."""
        if self._spare.empty() and not self._requested.is_set():
            self._requested.set()
            self._attempted.clear()
            self._jobs.put((-1, 0))

    def take_segment(self, path: Path) -> int | None:
        """Rename the spare segment to `path`; return its open file, which begins with the magic, or None."""
        try:
            file = self._spare.get_nowait()
        except queue.Empty:
            return None
        try:
            if path.exists():
                raise FileExistsError(f"{path} already exists")
            self._path.rename(path)
        except OSError as error:
            os.close(file)
            log.warning("event=spare_segment_not_used reason=%r", str(error))
            return None
        return file

    def truncate_segment(self, file: int, size: int) -> None:
        """Truncate a segment to its records and close it, in the background."""
        self._jobs.put((file, size))

    # --- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            file, size = job
            if file >= 0:
                _truncate(file, size)
                continue
            try:
                self._spare.put(self._create())
                self._is_failing = False
            except OSError as error:
                if not self._is_failing:
                    log.warning("event=segment_not_preallocated reason=%r", str(error))
                self._is_failing = True
            finally:
                self._requested.clear()
                self._attempted.set()

    def _create(self) -> int:
        """Return the open file of a new spare segment. Raises OSError."""
        self._path.unlink(missing_ok=True)
        free = os.statvfs(self._folder)
        if free.f_bavail * free.f_frsize < _MIN_FREE_SEGMENTS * self._size:
            raise OSError(
                f"less than {_MIN_FREE_SEGMENTS * self._size} bytes are free: segments grow as they are written"
            )
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            write_all(file, MAGIC, 0)
            for at in range(len(MAGIC), self._size, len(_CHUNK)):
                write_all(file, _CHUNK[: self._size - at], at)
                os.fdatasync(file)  # in parts: one sync of all zeros would delay the syncs of calls by milliseconds
            os.fsync(file)
            sync_folder(self._folder)
        except OSError:
            os.close(file)
            self._path.unlink(missing_ok=True)
            raise
        return file

    def _delete_spare(self) -> None:
        try:
            os.close(self._spare.get_nowait())
            self._path.unlink(missing_ok=True)
        except (queue.Empty, OSError) as error:
            log.debug("event=spare_segment_not_deleted reason=%r", str(error))


def _truncate(file: int, size: int) -> None:
    try:
        os.ftruncate(file, size)
    except OSError as error:
        log.warning("event=segment_not_truncated reason=%r", str(error))
    finally:
        os.close(file)
