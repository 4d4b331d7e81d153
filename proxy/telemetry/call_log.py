"""One line per call, at its end: who, how long, how many tokens, how it ended. Never content, never a key.

What waits to be written is a line's values, not the call's record with its messages: memory that is free at once is
still in the processor's caches for the next call. They are put into words where they are written (`logs.py`).

The lines go to the logger `ratchet.calls`, level INFO, in logfmt; `logs.py` turns them into JSON where that is asked.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from ratchet.proxy.telemetry.call_timing import CallTiming
from ratchet.proxy.telemetry.logs import FIELDS
from ratchet.store.records import CallEnded

log = logging.getLogger("ratchet.calls")

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._:~@+/-[]")


class LogLine:
    """A line's keys and values, which become words when it is written."""

    __slots__ = ("_fields",)

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def __str__(self) -> str:
        return " ".join(f"{name}={logfmt(value)}" for name, value in self._fields.items())


def log_call(record: CallEnded, timing: CallTiming, failure: str | None) -> None:
    """Log the end of a call. Where the logger's level is above INFO nothing is kept or written."""
    if log.isEnabledFor(logging.INFO):
        fields = log_fields(record, timing, failure)
        log.handle(
            log.makeRecord(log.name, logging.INFO, __file__, 0, LogLine(fields), (), None, "call", {FIELDS: fields})
        )


def log_fields(record: CallEnded, timing: CallTiming, failure: str | None) -> dict[str, Any]:
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
