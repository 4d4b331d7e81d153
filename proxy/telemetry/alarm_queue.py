"""Passes alarms from threads that must not wait for the store to the shipper, which writes them.

If the store is unavailable, alarms wait; the latest reason of a name wins. Memory is one entry per name.
"""

from __future__ import annotations

import logging
import threading

from ratchet.store.store import Store

log = logging.getLogger("ratchet.proxy")


class AlarmQueue:
    """Alarms that are not in the store yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._to_raise: dict[str, str] = {}  # name to reason
        self._to_clear: set[str] = set()  # after the alarms to raise
        self._active: set[str] = set()

    def raise_alarm(self, name: str, reason: str) -> None:
        """Raise an alarm soon."""
        with self._lock:
            if name not in self._active:
                log.error("event=alarm name=%s reason=%r", name, reason)
            self._to_raise[name] = reason
            self._to_clear.discard(name)
            self._active.add(name)

    def clear_alarm(self, name: str) -> None:
        """Clear an alarm soon, if this queue raised it."""
        with self._lock:
            if name in self._active:
                self._active.discard(name)
                self._to_clear.add(name)

    def deliver_alarms(self, store: Store) -> None:
        """Write the queued alarms to the store; keep those that it does not accept. Never raises."""
        with self._lock:
            to_raise, self._to_raise = self._to_raise, {}
            to_clear, self._to_clear = self._to_clear, set()
        try:
            while to_raise:
                name = next(iter(to_raise))
                store.alarms.raise_(name, to_raise[name])
                del to_raise[name]
            while to_clear:
                name = next(iter(to_clear))
                store.alarms.clear(name)
                to_clear.discard(name)
        except Exception as error:  # noqa: BLE001 -- for any failure of the store: the alarms wait
            log.warning("event=alarms_not_delivered count=%d reason=%r", len(to_raise) + len(to_clear), str(error))
            with self._lock:
                self._to_raise = to_raise | self._to_raise
                self._to_clear |= to_clear
