"""Alarms of rooms that died, raised in the store by a thread of their own.

A store that does not answer stalls no upkeep. An alarm that the store does not take is told and let go: what `up` says
of the death is there in any case.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from ratchet.settings.state_folder import ROOMS
from ratchet.store.errors import StoreError
from ratchet.store.store import Store
from ratchet.supervisor.events import Event


def name_of(room: str) -> str:
    """Return the name of a room's alarm."""
    return f"room_{room}"


def clear_all(store: Store) -> None:
    """The rooms are started anew: what an earlier run said of them is over. Raises StoreError."""
    for room in ROOMS:
        store.alarms.clear(name_of(room))


class ServiceAlarms:
    """Call it with a room and the reason, or with None where its alarm is over."""

    def __init__(self, open_store: Callable[[], Store], on_event: Callable[[Event], None]) -> None:
        self._open = open_store
        self._on_event = on_event
        self._waiting: queue.SimpleQueue[tuple[str, str | None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def __call__(self, room: str, reason: str | None) -> None:
        """Raise or clear soon."""
        self._waiting.put((room, reason))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="room-alarms", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            room, reason = self._waiting.get()
            try:
                self._write(name_of(room), reason)
            except StoreError as error:
                self._on_event(Event("note", text=f"the alarm {name_of(room)} is not in the store: {error}"))

    def _write(self, name: str, reason: str | None) -> None:
        store = self._open()
        try:
            if reason is None:
                store.alarms.clear(name)
            else:
                store.alarms.raise_(name, reason)
        finally:
            store.close()
