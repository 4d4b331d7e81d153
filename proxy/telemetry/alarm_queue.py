"""Alarms from threads that must not wait for the store: rung here, raised in the store by the shipper.

An alarm that cannot be raised now waits; the latest reason of a name wins. Memory is one entry per name.
"""

from __future__ import annotations

import logging
import threading

from ratchet.store.store import Store

log = logging.getLogger("ratchet.proxy")


class AlarmQueue:
    """Alarms on their way to the store."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rung: dict[str, str] = {}  # not raised in the store yet
        self._over: set[str] = set()  # to be cleared there, after that
        self._standing: set[str] = set()

    def raise_alarm(self, name: str, reason: str) -> None:
        """Raise an alarm soon."""
        with self._lock:
            if name not in self._standing:
                log.error("event=alarm name=%s reason=%r", name, reason)
            self._rung[name] = reason
            self._over.discard(name)
            self._standing.add(name)

    def clear_alarm(self, name: str) -> None:
        """Clear an alarm soon, if it was rung here."""
        with self._lock:
            if name in self._standing:
                self._standing.discard(name)
                self._over.add(name)

    def deliver_alarms(self, store: Store) -> None:
        """Write the alarms that wait; what the store does not take waits on. Raises nothing."""
        with self._lock:
            rung, self._rung = self._rung, {}
            over, self._over = self._over, set()
        try:
            while rung:
                name = next(iter(rung))
                store.alarms.raise_(name, rung[name])
                del rung[name]
            while over:
                name = next(iter(over))
                store.alarms.clear(name)
                over.discard(name)
        except Exception as error:  # noqa: BLE001 -- whatever ails the store, the alarms wait for it
            log.warning("event=alarms_wait count=%d reason=%r", len(rung) + len(over), str(error))
            with self._lock:
                self._rung = rung | self._rung
                self._over |= over
