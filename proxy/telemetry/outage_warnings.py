"""Warnings about something that is tried often and fails for a while."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ratchet.proxy.telemetry.metrics import StoreStatus

_PAUSE_SECONDS = 60.0
_HUNG_SECONDS = 5.0


class OutageWarnings:
    """Logs a failure when it begins, and at most once a minute until it ends; calls `on_begin` when it begins."""

    def __init__(self, log: logging.Logger, event: str, on_begin: Callable[[], None] = lambda: None) -> None:
        self._log = log
        self._event = event
        self._on_begin = on_begin
        self._warned_at: float | None = None  # on the monotonic clock, in this outage

    def warn(self, error: Exception) -> None:
        """Note a failure."""
        now = time.monotonic()
        if self._warned_at is None:
            self._on_begin()
        if self._warned_at is None or now - self._warned_at >= _PAUSE_SECONDS:
            self._warned_at = now
            self._log.warning("event=%s reason=%r", self._event, str(error))

    def end(self) -> None:
        """Note a success: the next failure is logged at once."""
        self._warned_at = None


@contextmanager
def watch_store_use(status: StoreStatus, use: str, outage: OutageWarnings) -> Iterator[None]:
    """Report and log a use of the store that takes longer than 5 s while it lasts: a hanging server refuses nothing.

    For use in an event loop that runs on meanwhile.
    """

    def report_hung() -> None:
        status.report(use, ok=False)
        outage.warn(TimeoutError(f"the store has not answered for {_HUNG_SECONDS:g} s, and is still waited for"))

    timer = asyncio.get_running_loop().call_later(_HUNG_SECONDS, report_hung)
    try:
        yield
    finally:
        timer.cancel()
