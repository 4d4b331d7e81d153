"""The lease of the coordinator that decides, in the store: of several coordinators, the others stand by.

A coordinator decides for `_VALID_SECONDS` after it began to renew the lease, which expires later, so that clocks that
differ by less than `_LEASE_SECONDS - _VALID_SECONDS` never let two decide. One that could not renew it in time knows
no longer what was decided meanwhile: it stops deciding at once, and ends when the store answers again; its supervisor
starts it again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial

from ratchet.proxy.errors import NotReady
from ratchet.proxy.runtime.critical_tasks import CriticalTasks
from ratchet.store.errors import StoreError
from ratchet.store.store import Store

log = logging.getLogger("ratchet.proxy")

_LEASE_SECONDS = 6.0
_VALID_SECONDS = 4.0
_RENEW_SECONDS = 1.0


class CoordinatorLease:
    """The service. `group`: names the proxies that share coordinators. `owner`: the same after a restart."""

    def __init__(self, store: Store, group: str, owner: str, critical_tasks: CriticalTasks) -> None:
        self._store = store
        self._name = f"proxy-coordinator:{group}"
        self._owner = owner
        self._critical_tasks = critical_tasks
        self._valid_until = 0.0  # seconds of the monotonic clock
        self._task: asyncio.Task[None] | None = None
        self.acquired = asyncio.Event()

    @property
    def is_held(self) -> bool:
        """Whether this coordinator decides."""
        return time.monotonic() < self._valid_until

    async def start(self) -> None:
        """Begin to wait for the lease."""
        self._task = self._critical_tasks.start_task(self._run(), "coordinator lease")

    async def stop(self) -> None:
        """Release the lease, so that another coordinator takes over at once."""
        if self._task is not None:
            await self._critical_tasks.stop_tasks(self._task)
        if self.is_held:
            self._valid_until = 0.0
            try:
                await asyncio.to_thread(self._store.leases.release, self._name, self._owner)
            except StoreError as error:
                log.warning("event=lease_not_released reason=%r", str(error))

    async def _run(self) -> None:
        """Wait for the lease, then renew it. Raises NotReady if it lapsed."""
        acquire = partial(self._store.leases.acquire, self._name, self._owner, _LEASE_SECONDS)
        was_standby = False
        while True:
            sent_at = time.monotonic()
            try:
                is_ours = await asyncio.to_thread(acquire)
            except StoreError as error:
                log.warning("event=lease_unknown reason=%r", str(error))
            else:
                if self.acquired.is_set() and not (is_ours and self.is_held):
                    raise NotReady("the lease was not renewed in time: another coordinator may have decided meanwhile")
                if is_ours:
                    self._valid_until = sent_at + _VALID_SECONDS
                    self.acquired.set()
                elif not was_standby:
                    was_standby = True
                    log.info("event=standing_by")
            await asyncio.sleep(_RENEW_SECONDS)
