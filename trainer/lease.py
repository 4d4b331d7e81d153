"""Leases: one trainer per alias, one tuner per tuning run. Another process waits or is refused, or succeeds a dead one.

Promises: a holder that could not renew its lease in time, because the process or the store was down, asks the store
again before it continues. The store does not depend on leases: a round that another trainer overtook cannot commit.
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
from ratchet.store.operation_records import LeaseHolder
from ratchet.store.store import Store
from ratchet.trainer.errors import TrainerError

log = logging.getLogger(__name__)

_MAX_HOST = 64  # characters


class Lease:
    """A lease that a thread renews while the holder works."""

    def __init__(self, store: Store, name: str, seconds: float, on_lost: Callable[[], None] = lambda: None) -> None:
        self._store = store
        self._on_lost = on_lost  # called in that thread
        self._name = name
        self._seconds = seconds
        self.owner = new_id(f"{socket.gethostname()[:_MAX_HOST]}:{os.getpid()}")
        self._stop = threading.Event()
        self._lost = threading.Event()
        self._renewed_at = 0.0  # monotonic
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def wait(self, stop: threading.Event) -> bool:
        """Wait for the lease; return False if `stop` came first."""
        logged = ""
        while True:
            try:
                if self._holder() is None and self._take():  # looking is cheaper than trying
                    break
                reason = "another trainer holds it"
            except StoreUnavailable as outage:
                reason = str(outage)
            if reason != logged:
                log.info("event=lease_waiting name=%s reason=%r", self._name, reason)
                logged = reason
            if stop.wait(self._seconds / 10):
                return False
        self._thread.start()
        return True

    def claim(self, on_wait: Callable[[str], None] = lambda message: None) -> None:
        """Take the lease; wait for a dead holder's to expire. Raises TrainerError if a live holder renews it.

        Calls `on_wait` with a message that names the holder.
        """
        first = None
        while not self._take():
            holder = self._holder()
            if holder is not None and first is None:
                first = holder
                seen = f"{self._name} is held by {describe_owner(holder.owner)}"
                on_wait(f"{seen}: waiting at most {self._seconds:g} s to see whether that process is alive")
            elif holder is not None and first is not None and holder.expires_at > first.expires_at:
                raise TrainerError(
                    f"{self._name} is held by {describe_owner(holder.owner)}, which is alive; stop it first"
                )
            time.sleep(self._seconds / 50)
        self._thread.start()

    def is_held(self) -> bool:
        """Return whether the lease is ours; asks the store if it was not renewed in time. Raises StoreUnavailable."""
        overdue = time.monotonic() - self._renewed_at > self._seconds
        return self.confirmed() if overdue else not self._lost.is_set()

    def confirmed(self) -> bool:
        """Return whether the store still grants us the lease. Raises StoreUnavailable."""
        if not self._lost.is_set() and not self._take():
            self._lost.set()
        return not self._lost.is_set()

    def check(self) -> None:
        """Raise TrainerError if another process took over, StoreUnavailable if the store does not answer."""
        if not self.is_held():
            raise TrainerError(f"another process took the lease {self._name}; this one stops")

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

    def _holder(self) -> LeaseHolder | None:
        return next((one for one in self._store.leases.holders(self._name) if one.name == self._name), None)

    def _take(self) -> bool:
        requested_at = time.monotonic()
        taken = self._store.leases.acquire(self._name, self.owner, self._seconds)
        if taken:
            self._renewed_at = requested_at
        return taken

    def _renew(self) -> None:
        while not self._stop.wait(self._seconds / 4):
            try:
                if not self._take():
                    self._lost.set()
                    self._on_lost()
                    return
            except StoreUnavailable as outage:
                log.warning("event=lease_not_renewed reason=%r", str(outage))


def describe_owner(owner: str) -> str:
    """Return the holder of a lease for people: process, host and start time."""
    host, _, pid = owner.rpartition("_")[0].rpartition(":")
    since = datetime.fromtimestamp(moment(owner), UTC)
    return f"process {pid} on {host}, since {since:%Y-%m-%d %H:%M:%S} UTC"
