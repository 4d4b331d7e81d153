"""The next segment, made before it is needed: its blocks hold zeros, so that a sync of records writes no metadata.

Promises: what `take` gives was on this disk, to its last zero and with its first name, before; nothing here fails a
call or keeps one waiting: where the disk is short or broken there is no blank, and the journal's segments grow as they
are written. At most one blank waits beside the current segment; `max_journal_bytes` counts no zeros. The name that a
blank gets when it is taken is not synced: after a power cut its records may stand under the first one, for
`adopt_segment` to find.
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
_SPARE = 8  # there is no blank where less is free on the disk than so many of them


def adopt_segment(folder: Path, segment: Path) -> None:
    """Make a segment of the blank that an earlier process left, if it has records. Raises OSError."""
    left = folder / _NAME
    if left.is_file() and records_end(left) > len(MAGIC):
        left.rename(segment)


class SegmentPreallocator:
    """Makes blanks, and cuts used ones to what they hold, in a thread of its own."""

    def __init__(self, folder: Path, size: int, critical_tasks: CriticalTasks) -> None:
        self._folder = folder
        self._size = size
        self._ready: queue.SimpleQueue[int] = queue.SimpleQueue()  # the descriptor of the blank that waits
        self._asked: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._wanted = threading.Event()  # set from the wish for a blank to its end
        self._settled = threading.Event()  # set when the latest wish was met, or could not be
        self._thread = critical_tasks.make_thread(self._run, "journal-blanks")

    @property
    def _path(self) -> Path:
        return self._folder / _NAME

    def start(self, most_seconds: float) -> None:
        """Make the first one; waits for it so long at most."""
        self._thread.start()
        self.want()
        self._settled.wait(most_seconds)

    def stop(self) -> None:
        """Finish, and leave no blank behind."""
        self._asked.put(None)
        self._thread.join()
        self._drop()

    def want(self) -> None:
        """Have a blank made, if none waits. Never blocks."""
        if self._ready.empty() and not self._wanted.is_set():
            self._wanted.set()
            self._settled.clear()
            self._asked.put((-1, 0))

    def take(self, path: Path) -> int | None:
        """Give the blank this path; return its open file, which begins with the magic. None where there is none."""
        try:
            file = self._ready.get_nowait()
        except queue.Empty:
            return None
        try:
            if path.exists():
                raise FileExistsError(f"{path} is there already")
            self._path.rename(path)
        except OSError as error:
            os.close(file)
            log.warning("event=blank_not_used reason=%r", str(error))
            return None
        return file

    def cut(self, file: int, size: int) -> None:
        """Cut a segment to what it holds and close it, behind the caller's back."""
        self._asked.put((file, size))

    # --- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            file, size = asked
            if file >= 0:
                _cut(file, size)
                continue
            try:
                self._ready.put(self._make())
            except OSError as error:
                log.warning("event=no_blank_segment reason=%r", str(error))
            finally:
                self._wanted.clear()
                self._settled.set()

    def _make(self) -> int:
        """Return a blank's open file. Raises OSError."""
        self._path.unlink(missing_ok=True)
        free = os.statvfs(self._folder)
        if free.f_bavail * free.f_frsize < _SPARE * self._size:
            raise OSError(f"less than {_SPARE * self._size} bytes are free: segments grow as they are written")
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            write_all(file, MAGIC, 0)
            for at in range(len(MAGIC), self._size, len(_CHUNK)):
                write_all(file, _CHUNK[: self._size - at], at)
            os.fsync(file)
            sync_folder(self._folder)
        except OSError:
            os.close(file)
            self._path.unlink(missing_ok=True)
            raise
        return file

    def _drop(self) -> None:
        try:
            os.close(self._ready.get_nowait())
            self._path.unlink(missing_ok=True)
        except (queue.Empty, OSError) as error:
            log.debug("event=no_blank_to_drop reason=%r", str(error))


def _cut(file: int, size: int) -> None:
    try:
        os.ftruncate(file, size)
    except OSError as error:
        log.warning("event=segment_not_cut reason=%r", str(error))
    finally:
        os.close(file)
