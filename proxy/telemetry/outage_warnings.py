"""Warnings about something that is tried often and fails for a while."""

from __future__ import annotations

import logging
import time

_PAUSE_SECONDS = 60.0


class OutageWarnings:
    """Logs a failure when it begins, and at most once a minute until it ends."""

    def __init__(self, log: logging.Logger, event: str) -> None:
        self._log = log
        self._event = event
        self._warned_at: float | None = None  # on the monotonic clock, in this outage

    def warn(self, error: Exception) -> None:
        """Note a failure."""
        now = time.monotonic()
        if self._warned_at is None or now - self._warned_at >= _PAUSE_SECONDS:
            self._warned_at = now
            self._log.warning("event=%s reason=%r", self._event, str(error))

    def end(self) -> None:
        """Note a success: the next failure is logged at once."""
        self._warned_at = None
