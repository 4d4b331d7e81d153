"""Which log lines a process writes, and how: text with `event=... key=value`, or one JSON object per line, to stderr.

Promises: no line is waited for. A thread of the log's own writes them (the standard library's QueueHandler and
QueueListener), so that a stderr that blocks, such as a full pipe that nobody reads, stalls no other thread and no end
of the process. At most `MAX_WAITING_LINES` lines wait; further ones are dropped and counted, and the log says how many
once it can be written again. A line is written soon; lines of calls, which are many, `_PAUSE` seconds later at most.
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
    "alembic",
    "httpx",
    "httpcore",
    "asyncio",
)  # libraries whose lines of INFO and below tell a user nothing
_TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"

Level = Literal["debug", "info", "warning", "error"]
START_LOGGER = "ratchet.start"  # the logger of what `ratchet up` waits for: that a room is ready is told at any level
FIELDS = "ratchet_fields"  # attribute of a call's line: its keys and values, for formats other than text
MAX_WAITING_LINES = 10_000  # lines
_PAUSE = 0.2  # seconds between looks: waking the thread for each call would cost more than the line
_LAST_LINES = 1.0  # seconds that the end of the process waits for the lines that are left

log = logging.getLogger("ratchet.log")


def configure_logging(
    form: Literal["text", "json"], level: Level = "info", write: Callable[[str], None] | None = None
) -> None:
    """Write the lines of this process from `level` on to stderr in that form; `write` writes them in its place."""
    lines = _WaitingLines()
    logging.basicConfig(level=level.upper(), handlers=[lines])
    if lines in logging.getLogger().handlers:  # else this process has its handlers already
        formatter = JsonFormatter() if form == "json" else logging.Formatter(_TEXT)
        writer = _LineWriter(lines, formatter, write or _to_stderr)
        writer.start()
        atexit.register(writer.stop)
    logging.getLogger(START_LOGGER).setLevel(logging.INFO)
    for name in _QUIETED_LOGGERS:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))


def dropped_lines() -> int:
    """Return how many lines of this process were not written."""
    return sum(handler.dropped for handler in logging.getLogger().handlers if isinstance(handler, _WaitingLines))


class _WaitingLines(QueueHandler):
    """The lines that wait. Taking one never waits, and may happen in a signal's handler."""

    def __init__(self) -> None:
        self.waiting: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
        super().__init__(self.waiting)
        self.dropped = 0
        self.wake = threading.Event()

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Return a record that holds on to nothing that may change or is large; a call's line is worded later."""
        if not record.args and not record.exc_info:
            return record
        record = copy.copy(record)
        record.msg, record.args = record.getMessage(), None
        if record.exc_info:
            record.exc_text = record.exc_text or logging.Formatter().formatException(record.exc_info)
            record.exc_info = None
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        """Keep a record until it is written, or count it as dropped."""
        if self.waiting.qsize() >= MAX_WAITING_LINES:
            self.dropped += 1
            return
        self.waiting.put(record)
        if FIELDS not in record.__dict__:
            self.wake.set()

    def handleError(self, record: logging.LogRecord) -> None:
        """Count a line that cannot be worded; the standard library would write to stderr here."""
        self.dropped += 1


class _LineWriter(QueueListener):
    """The thread that words the lines and writes them."""

    def __init__(self, lines: _WaitingLines, formatter: logging.Formatter, write: Callable[[str], None]) -> None:
        super().__init__(lines.waiting)
        self._lines = lines
        self._formatter = formatter
        self._write = write
        self._reported = 0  # of the dropped lines
        self._ending = False

    def dequeue(self, block: bool) -> Any:
        """Return the next record, once there is one; None at the end."""
        while True:
            try:
                return self._lines.waiting.get_nowait()
            except queue.Empty:
                self._report()
            if self._ending:
                return None
            self._lines.wake.wait(_PAUSE)
            self._lines.wake.clear()

    def handle(self, record: logging.LogRecord) -> None:
        """Write one line."""
        try:
            self._write(self._formatter.format(record) + "\n")
        except Exception:  # noqa: BLE001 -- there is no log to say it in; what was not written is counted
            self._lines.dropped += 1

    def stop(self) -> None:
        """Write what is left; a log that blocks is left alone after a moment."""
        self._ending = True
        self._lines.wake.set()
        if self._thread is not None:
            self._thread.join(_LAST_LINES)

    def _report(self) -> None:
        count = self._lines.dropped - self._reported
        if count > 0:
            self._reported += count
            words = "event=log_lines_dropped count=%d reason='the log was not read, or not written, fast enough'"
            self.handle(log.makeRecord(log.name, logging.WARNING, __file__, 0, words, (count,), None))


def _to_stderr(line: str) -> None:
    """Write to the file itself: `sys.stderr` has a lock, for which the end of the process would wait."""
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
        told = {
            "time": f"{moment}.{int(record.created % 1 * 1000):03d}Z",
            "level": record.levelname,
            "logger": record.name,
        }
        told |= getattr(record, FIELDS, None) or {"message": record.getMessage()}
        if record.exc_info:
            told["traceback"] = self.formatException(record.exc_info)
        elif record.exc_text:
            told["traceback"] = record.exc_text
        return msgspec.json.encode(told).decode()
