"""One line per call, at its end: who, how long, how many tokens, how it ended. Never content, never a key.

Promises: on the loop a line costs two microseconds; it is put into words and written by a thread of its own, a fifth
of a second later at most, with the time at which the call ended. A log that blocks (a full pipe) or a flood of calls
stalls nothing: beyond `most_waiting` lines the newest are dropped and counted. What waits is a line's values, not the
call's record with its messages: memory that is free at once is still in the processor's caches for the next call.

The lines go to the logger `ratchet.calls`, level INFO, in logfmt; `logs.py` turns them into JSON where that is asked.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from proxy.observing.metrics import Metrics
from proxy.observing.timing import Timing
from store.records import CallEnded

log = logging.getLogger("ratchet.calls")

FIELDS = "ratchet_fields"  # attribute of a log record: its keys and values, for formats other than text
_PAUSE = 0.2  # seconds between looks: waking the thread for each call would cost more than the line
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._:~@+/-[]")

_Entry = tuple[float, dict[str, Any]]  # when the call ended (Unix seconds), what its line says


class CallLog:
    """The writer of the lines. Where the logger's level is above INFO nothing is kept or written."""

    def __init__(self, metrics: Metrics, most_waiting: int = 10_000) -> None:
        self._metrics = metrics
        self._most_waiting = most_waiting
        self._waiting: deque[_Entry] = deque()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="call-log", daemon=True)

    async def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    async def stop(self) -> None:
        """Write what is left; a log that blocks is left alone after a moment."""
        self._stop.set()
        await asyncio.to_thread(self._thread.join, 1.0)

    def note(self, record: CallEnded, timing: Timing, failure: str | None) -> None:
        """Keep what a line says until it is written."""
        if not log.isEnabledFor(logging.INFO):
            return
        if len(self._waiting) >= self._most_waiting:
            self._metrics.log_lines_dropped.inc()
            return
        self._waiting.append((record.ended_at, told(record, timing, failure)))

    def _run(self) -> None:
        stopping = False
        while not stopping:
            stopping = self._stop.wait(_PAUSE)
            while self._waiting:
                _write(self._waiting.popleft())


def _write(entry: _Entry) -> None:
    ended_at, fields = entry
    text = " ".join(f"{name}={logfmt(value)}" for name, value in fields.items())
    line = log.makeRecord(log.name, logging.INFO, __file__, 0, text, (), None, "call", {FIELDS: fields})
    line.created = ended_at
    line.msecs = int(ended_at % 1 * 1000)
    log.handle(line)


def told(record: CallEnded, timing: Timing, failure: str | None) -> dict[str, Any]:
    """Return what a line says, in its order."""
    begun = record.begun
    return {
        "event": "call",
        "call": begun.call_id,
        "trajectory": begun.trajectory_id,
        "alias": begun.alias,
        "version": begun.version,
        "dialect": begun.dialect,
        "status": record.status,
        "state": str(record.state),
        "streamed": begun.streamed,
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "first_byte_ms": _milliseconds(timing.first_byte),
        "total_ms": _milliseconds(timing.total),
        "overhead_ms": _milliseconds(timing.overhead),
        "linked_by": begun.linked_by,
        "context": record.context,
        "untrainable": record.untrainable,
        "upstream": _address(record.upstream) if record.upstream else None,
        "error": failure,
    }


def logfmt(value: Any) -> str:
    """Return a value as logfmt: bare where that is unambiguous, else in double quotes; nothing for None."""
    if value is None:
        return ""
    if value is True or value is False:
        return "true" if value else "false"
    text = str(value)
    if _PLAIN.issuperset(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in escaped) + '"'


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 2)


@lru_cache(maxsize=256)
def _address(url: str) -> str:
    """Return host and port of an upstream: a URL may hold a password."""
    return urlsplit(url).netloc.rpartition("@")[2]
