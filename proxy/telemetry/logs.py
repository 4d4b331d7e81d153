"""Logging of a process to stderr: text with `event=... key=value`, or one JSON object per line.

Promises: logging never blocks. A separate thread writes the lines (the standard library's QueueHandler and
QueueListener), so a blocked stderr, such as a full pipe that nobody reads, delays neither other threads nor the exit
of the process. At most `MAX_WAITING_LINES` lines wait. Further lines are dropped and counted, and the log reports how
many once it can be written again. A line is written at once; the many lines of calls within `_LINGER_SECONDS`.
"""

from __future__ import annotations

import atexit
import copy
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from logging.handlers import QueueHandler, QueueListener
from typing import Any, Literal

import msgspec

_QUIETED_LOGGERS = (
    "httpx",
    "httpcore",
    "asyncio",
)  # libraries whose INFO lines do not help a user
_TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"

Level = Literal["debug", "info", "warning", "error"]
START_LOGGER = "ratchet.start"  # logs that a service is ready, at any level: `ratchet up` waits for these lines
FIELDS = "ratchet_fields"  # record attribute with the keys and values of a call's line, for formats other than text
MAX_WAITING_LINES = 10_000  # lines
# After a call's line: waking the thread for each call would cost more than the line, and many lines at once would keep
# the event loop waiting, on one core.
_LINGER_SECONDS = 0.02
_STOP_TIMEOUT = 1.0  # seconds that the exit of the process waits for the remaining lines

log = logging.getLogger("ratchet.log")


def configure_logging(
    form: Literal["text", "json"], level: Level = "info", write: Callable[[str], None] | None = None
) -> None:
    """Log lines of `level` and above to stderr in that form, or pass them to `write` instead."""
    lines = _WaitingLines()
    logging.basicConfig(level=level.upper(), handlers=[lines])
    if lines in logging.getLogger().handlers:  # else this process already has handlers
        formatter = JsonFormatter() if form == "json" else logging.Formatter(_TEXT)
        writer = _LineWriter(lines, formatter, write or _to_stderr)
        writer.start()
        atexit.register(writer.stop)
    logging.getLogger(START_LOGGER).setLevel(logging.INFO)
    for name in _QUIETED_LOGGERS:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))


def dropped_lines() -> int:
    """Return how many lines of this process were dropped."""
    return sum(handler.dropped for handler in logging.getLogger().handlers if isinstance(handler, _WaitingLines))


class _WaitingLines(QueueHandler):
    """The queue of lines. Adding a line never blocks and is safe in a signal handler."""

    def __init__(self) -> None:
        self.waiting: queue.SimpleQueue[logging.LogRecord | None] = queue.SimpleQueue()
        super().__init__(self.waiting)
        self.dropped = 0
        self.wake = threading.Event()

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Return a record without references to mutable or large objects; a call's line is formatted later."""
        if not record.args and not record.exc_info:
            return record
        record = copy.copy(record)
        record.msg, record.args = record.getMessage(), None
        if record.exc_info:
            record.exc_text = record.exc_text or logging.Formatter().formatException(record.exc_info)
            record.exc_info = None
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queue a record, or count it as dropped."""
        if self.waiting.qsize() >= MAX_WAITING_LINES:
            self.dropped += 1
            return
        self.waiting.put(record)
        if FIELDS not in record.__dict__:
            self.wake.set()

    def handleError(self, record: logging.LogRecord) -> None:
        """Count a line that cannot be formatted; the standard library would write to stderr here."""
        self.dropped += 1


class _LineWriter(QueueListener):
    """The thread that formats and writes the lines."""

    def __init__(self, lines: _WaitingLines, formatter: logging.Formatter, write: Callable[[str], None]) -> None:
        super().__init__(lines.waiting)
        self._lines = lines
        self._formatter = formatter
        self._write = write
        self._reported = 0  # dropped lines
        self._stopping = False
        self._lingers = False  # the last line was a call's

    def dequeue(self, block: bool) -> Any:
        """Wait for the next record; return None after `stop`."""
        while True:
            try:
                record = self._lines.waiting.get_nowait()
            except queue.Empty:
                self._report_dropped()
                if self._stopping:
                    return None
                record = self._wait()
            if record is not None:
                return record

    def _wait(self) -> logging.LogRecord | None:
        """Wait for the next record; return None after a pause in which more of them may have come."""
        if not self._lingers:
            return self._lines.waiting.get()
        self._lingers = False
        self._lines.wake.wait(_LINGER_SECONDS)
        self._lines.wake.clear()
        return None

    def handle(self, record: logging.LogRecord) -> None:
        """Write one line."""
        self._lingers = FIELDS in record.__dict__
        try:
            self._write(self._formatter.format(record) + "\n")
        except Exception:  # noqa: BLE001 -- the log itself failed; the line is counted
            self._lines.dropped += 1

    def stop(self) -> None:
        """Write the remaining lines; give up after a timeout if writing blocks."""
        self._stopping = True
        self._lines.waiting.put(None)
        self._lines.wake.set()
        if self._thread is not None:
            self._thread.join(_STOP_TIMEOUT)

    def _report_dropped(self) -> None:
        count = self._lines.dropped - self._reported
        if count > 0:
            self._reported += count
            line = "event=log_lines_dropped count=%d reason='the log was not written or read fast enough'"
            self.handle(log.makeRecord(log.name, logging.WARNING, __file__, 0, line, (count,), None))


def _to_stderr(line: str) -> None:
    """Write to the file descriptor: `sys.stderr` has a lock that the exit of the process would wait for."""
    if sys.__stderr__ is None:  # this process was started without one
        return
    data, file = line.encode("utf-8", "backslashreplace"), sys.__stderr__.fileno()
    while data:
        data = data[os.write(file, data) :]


class JsonFormatter(logging.Formatter):
    """time (UTC, RFC 3339), level, logger; then a call's fields, or the message; then a traceback as one string."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = {
            "time": f"{moment}.{int(record.created % 1 * 1000):03d}Z",
            "level": record.levelname,
            "logger": record.name,
        }
        fields |= getattr(record, FIELDS, None) or {"message": record.getMessage()}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        elif record.exc_text:
            fields["traceback"] = record.exc_text
        return msgspec.json.encode(fields).decode()
