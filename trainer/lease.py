"""The trainer's lease: one trainer leads an alias; another waits, and takes over when this one stops renewing.

Promises: a holder that could not renew for the lease's own time, because it stood still or the store was away, asks
again before it goes on. The store does not rest on it: a round that another leader has overtaken cannot be committed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from types import TracebackType

from store import Store
from store.errors import StoreUnavailable
from store.ids import new_id
from trainer.errors import LeaseLost

log = logging.getLogger(__name__)


class Lease:
    """A lease that a thread renews while the holder works, however long one round takes."""

    def __init__(self, store: Store, name: str, seconds: float) -> None:
        self._store = store
        self._name = name
        self._seconds = seconds
        self.owner = new_id(f"pid{os.getpid()}")
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

    def check(self) -> None:
        """Raise LeaseLost when another trainer has taken over, StoreUnavailable when that cannot be known."""
        overdue = time.monotonic() - self._renewed_at > self._seconds
        if self._lost.is_set() or (overdue and not self._take()):
            self._lost.set()
            raise LeaseLost(f"the lease {self._name} was taken by another trainer; this one stops")

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
