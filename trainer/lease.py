"""The trainer's lease: one trainer leads an alias; another waits, and takes over when this one stops renewing."""

from __future__ import annotations

import logging
import os
import threading
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
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def wait(self, stop: threading.Event) -> bool:
        """Wait until the lease is ours; False when `stop` came first."""
        waiting = False
        while not self._store.leases.acquire(self._name, self.owner, self._seconds):
            if not waiting:
                log.info("event=lease_waiting name=%s", self._name)
                waiting = True
            if stop.wait(self._seconds / 10):
                return False
        self._thread.start()
        return True

    def check(self) -> None:
        """Raise LeaseLost when another trainer has taken over."""
        if self._lost.is_set():
            raise LeaseLost(f"the lease {self._name} was taken by another trainer; this one stops")

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        if not self._lost.is_set():
            self._store.leases.release(self._name, self.owner)

    def _renew(self) -> None:
        while not self._stop.wait(self._seconds / 4):
            try:
                if not self._store.leases.acquire(self._name, self.owner, self._seconds):
                    self._lost.set()
                    return
            except StoreUnavailable as error:
                log.warning("event=lease_not_renewed reason=%r", str(error))
