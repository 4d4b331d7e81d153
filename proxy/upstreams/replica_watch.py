"""Follows a list of replicas that may change: a name's addresses, or a file.

A replica that leaves gets no new calls; running ones finish, as metrics and log show. A new one is probed at once, and
gets a version's calls once the trainer has proven that it serves it. A list that cannot be read leaves the replicas as
they are.
"""

from __future__ import annotations

import asyncio
import logging

from ratchet.proxy.runtime.critical_tasks import CriticalTasks
from ratchet.proxy.upstreams.circuit_breaker import CircuitBreaker
from ratchet.proxy.upstreams.replica_pool import Replica, ReplicaPool
from ratchet.proxy.upstreams.replica_probes import ReplicaProbes
from ratchet.proxy.upstreams.vllm_client import Upstream
from ratchet.store.access.replicas import ReplicaList, without_credentials

log = logging.getLogger("ratchet.proxy")


class ReplicaWatch:
    """The background task; it does nothing if the list never changes."""

    def __init__(
        self,
        replica_list: ReplicaList,
        upstream: Upstream,
        pool: ReplicaPool[Replica],
        probes: ReplicaProbes[Replica],
        critical_tasks: CriticalTasks,
        *,
        failures: int,
        cool_off: float,
        interval: float = 5.0,
    ) -> None:
        self._list = replica_list
        self._upstream = upstream
        self._pool = pool
        self._probes = probes
        self._critical_tasks = critical_tasks
        self._failures = failures
        self._cool_off = cool_off
        self._interval = interval
        self._problem: str | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start following, if there is anything to follow."""
        if not self._list.is_fixed:
            self._tasks = [self._critical_tasks.start_task(self._follow(), "replicas")]

    async def stop(self) -> None:
        """Stop following."""
        await self._critical_tasks.stop_tasks(*self._tasks)

    async def _follow(self) -> None:
        while True:
            await self.refresh()
            await asyncio.sleep(self._interval)

    async def refresh(self) -> None:
        """Read the list, and take over what changed."""
        urls = await asyncio.to_thread(self._list.resolve)
        if self._list.problem not in (None, self._problem):
            log.warning("event=upstreams_not_read reason=%r", self._list.problem)
        self._problem = self._list.problem
        current = tuple(replica.url for replica in self._pool.replicas)
        known = {replica.url: replica for replica in (*self._pool.draining, *self._pool.replicas)}
        found = tuple(map(without_credentials, urls))
        if not found or found == current:
            return
        self._upstream.replace(urls)
        self._pool.replace(
            [known.get(url) or Replica(url, CircuitBreaker(self._failures, self._cool_off)) for url in found]
        )
        await self._probes.follow_pool()
        came, went = [url for url in found if url not in current], [url for url in current if url not in found]
        log.info("event=upstreams_changed came=%s went=%s", came, went)
