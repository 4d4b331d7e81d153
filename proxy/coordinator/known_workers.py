"""The workers that a coordinator knows, in the store: the one that follows waits for them before it decides.

What they served last may be in their journals only. A worker is known for as long as its trajectories stay open.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from ratchet.proxy.runtime.critical_tasks import CriticalTasks
from ratchet.store.errors import StoreError
from ratchet.store.store import Store

log = logging.getLogger("ratchet.proxy")

_PREFIX = "proxy-worker"
_RENEWALS = 4  # within the time that a worker is known


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
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to renew the workers' entries."""
        self._task = self._critical_tasks.start_task(self._renew(), "known workers")

    async def stop(self) -> None:
        """Stop renewing them."""
        if self._task is not None:
            await self._critical_tasks.stop_tasks(self._task)

    async def read(self) -> frozenset[str]:
        """Return the known workers of other machines; empty if the store does not answer."""
        prefix = f"{_PREFIX}:{self._group}:"
        holders = await self._call(partial(self._store.leases.holders, prefix), ())
        names = (holder.name.removeprefix(prefix) for holder in holders)
        return frozenset(name for name in names if not name.startswith(f"{self._machine}/"))

    async def add(self, worker: str) -> None:
        """Write down a worker."""
        await self._call(partial(self._store.leases.acquire, self._name(worker), self._group, self._seconds), None)

    async def remove(self, worker: str) -> None:
        """Forget a worker that has stopped."""
        await self._call(partial(self._store.leases.release, self._name(worker), self._group), None)

    def _name(self, worker: str) -> str:
        return f"{_PREFIX}:{self._group}:{worker}"

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._seconds / _RENEWALS)
            names = [self._name(worker) for worker in self._active()]
            await self._call(partial(self._store.leases.renew, names, self._group, self._seconds), None)

    async def _call(self, verb: Callable[[], Any], otherwise: Any) -> Any:
        try:
            return await asyncio.to_thread(verb)
        except StoreError as error:
            log.warning("event=known_workers_unavailable reason=%r", str(error))
            return otherwise
