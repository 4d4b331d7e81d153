"""The workers that a coordinator knows, in the store: the one that follows waits for them before it decides.

What they served last may be in their journals only. A worker is known for as long as its trajectories stay open.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from ratchet.proxy.runtime.critical_tasks import CriticalTasks
from ratchet.store.errors import StoreError
from ratchet.store.store import Store

log = logging.getLogger("ratchet.proxy")

_PREFIX = "proxy-worker"
_RENEWALS = 4  # within the time that a worker is known
_RETRY_SECONDS = 1.0  # while the store does not answer


class KnownWorkers:
    """The service. `group`: names the proxies that share coordinators. `machine`: the prefix of this proxy's workers.

    `active` returns the workers that have a session.
    """

    def __init__(
        self,
        store: Store,
        group: str,
        machine: str,
        seconds: float,
        active: Callable[[], Collection[str]],
        critical_tasks: CriticalTasks,
    ) -> None:
        self._store = store
        self._group = group
        self._machine = machine
        self._seconds = seconds
        self._active = active
        self._critical_tasks = critical_tasks
        self._unwritten: set[str] = set()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to renew the workers' entries."""
        self._task = self._critical_tasks.start_task(self._renew(), "known workers")

    async def stop(self) -> None:
        """Stop renewing them."""
        if self._task is not None:
            await self._critical_tasks.stop_tasks(self._task)

    async def read(self) -> frozenset[str]:
        """Return the known workers of other machines, once the store answers."""
        prefix = f"{_PREFIX}:{self._group}:"
        while (holders := await self._call(partial(self._store.leases.holders, prefix))) is None:
            await asyncio.sleep(_RETRY_SECONDS)
        names = (holder.name.removeprefix(prefix) for holder in holders)
        return frozenset(name for name in names if not name.startswith(f"{self._machine}/"))

    async def add(self, worker: str) -> None:
        """Write down a worker: now, or when the store answers again."""
        self._unwritten.add(worker)
        if await self._call(partial(self._store.leases.acquire, self._name(worker), self._group, self._seconds)):
            self._unwritten.discard(worker)

    async def remove(self, worker: str) -> None:
        """Forget a worker that has stopped."""
        self._unwritten.discard(worker)
        await self._call(partial(self._store.leases.release, self._name(worker), self._group))

    def _name(self, worker: str) -> str:
        return f"{_PREFIX}:{self._group}:{worker}"

    async def _renew(self) -> None:
        renewed_at = time.monotonic()
        while True:
            await asyncio.sleep(min(_RETRY_SECONDS, self._seconds / _RENEWALS))
            for worker in list(self._unwritten):
                await self.add(worker)
            if time.monotonic() - renewed_at >= self._seconds / _RENEWALS:
                renewed_at = time.monotonic()
                names = [self._name(worker) for worker in self._active()]
                await self._call(partial(self._store.leases.renew, names, self._group, self._seconds))

    async def _call(self, verb: Callable[[], Any]) -> Any:
        """Return what a verb returns; None if the store does not answer."""
        try:
            return await asyncio.to_thread(verb)
        except StoreError as error:
            log.warning("event=known_workers_unavailable reason=%r", str(error))
            return None
