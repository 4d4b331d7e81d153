"""Leases: one trainer leads an alias, one tuner has a run; another waits or is refused, and takes over from a dead one.

Promises: a holder that could not renew for the lease's own time, because it stood still or the store was away, asks
again before it goes on. The store does not rest on it: a round that another leader has overtaken cannot be committed.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from types import TracebackType

from ratchet.store.errors import StoreUnavailable
from ratchet.store.ids import moment, new_id
from ratchet.store.store import Store
from ratchet.trainer.errors import LeaseLost, LeaseTaken

log = logging.getLogger(__name__)

_LONGEST_HOST = 64  # characters


class Lease:
    """A lease that a thread renews while the holder works, however long one round takes."""

    def __init__(self, store: Store, name: str, seconds: float) -> None:
        self._store = store
        self._name = name
        self._seconds = seconds
        self.owner = new_id(f"{socket.gethostname()[:_LONGEST_HOST]}:{os.getpid()}")
        self._stop = threading.Event()
        self._lost = threading.Event()
        self._renewed_at = 0.0  # monotonic
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def wait(self, stop: threading.Event) -> bool:
        """Wait until the lease is ours; False when `stop` came first."""
        told = ""
        while True:
            try:
                if self._take():
                    break
                waits_for = "another trainer leads"
            except StoreUnavailable as outage:
                waits_for = str(outage)
            if waits_for != told:
                log.info("event=lease_waiting name=%s reason=%r", self._name, waits_for)
                told = waits_for
            if stop.wait(self._seconds / 10):
                return False
        self._thread.start()
        return True

    def claim(self, told: Callable[[str], None] = lambda waits: None) -> None:
        """Take the lease; wait as long as it takes a dead holder's to expire. Raises LeaseTaken where one renews it.

        `told` hears who is waited for.
        """
        first = None
        while not self._take():
            holder = next((one for one in self._store.leases.holders(self._name) if one.name == self._name), None)
            if holder is not None and first is None:
                first = holder
                seen = f"{self._name} was taken by {describe_owner(holder.owner)}"
                told(f"{seen}: waiting at most {self._seconds:g} s to see whether that works on it")
            elif holder is not None and first is not None and holder.expires_at > first.expires_at:
                raise LeaseTaken(
                    f"{self._name} is under way: {describe_owner(holder.owner)} has it; stop that one first"
                )
            time.sleep(self._seconds / 50)
        self._thread.start()

    def confirmed(self) -> bool:
        """Return whether it is ours yet, as the store says. Raises StoreUnavailable."""
        if not self._lost.is_set() and not self._take():
            self._lost.set()
        return not self._lost.is_set()

    def check(self) -> None:
        """Raise LeaseLost when another process has taken over, StoreUnavailable when that cannot be known."""
        overdue = time.monotonic() - self._renewed_at > self._seconds
        if self._lost.is_set() or (overdue and not self._take()):
            self._lost.set()
            raise LeaseLost(f"the lease {self._name} was taken by another process; this one stops")

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._lost.is_set():
            return
        try:
            self._store.leases.release(self._name, self.owner)
        except StoreUnavailable as outage:
            log.warning("event=lease_not_released name=%s reason=%r", self._name, str(outage))

    def _take(self) -> bool:
        asked_at = time.monotonic()
        taken = self._store.leases.acquire(self._name, self.owner, self._seconds)
        if taken:
            self._renewed_at = asked_at
        return taken

    def _renew(self) -> None:
        while not self._stop.wait(self._seconds / 4):
            try:
                if not self._take():
                    self._lost.set()
                    return
            except StoreUnavailable as outage:
                log.warning("event=lease_not_renewed reason=%r", str(outage))


def describe_owner(owner: str) -> str:
    """Return who holds a lease as people are told: host, process and since when."""
    host, _, pid = owner.rpartition("_")[0].rpartition(":")
    since = datetime.fromtimestamp(moment(owner), UTC)
    return f"process {pid} on {host}, since {since:%Y-%m-%d %H:%M:%S} UTC"
