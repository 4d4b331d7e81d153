"""Probes every replica periodically, so that a dead one is known before a call reaches it.

`/health/ready` reads the last results and sends no probe. An unreachable replica is probed again a second later. A
probe closes a breaker that has cooled off, so no agent's call is the test. A server that is not ours is probed only
for that (`only_if_down`). A refused connection counts as a failure at once; a slow response does not, since a replica
may be busy, until `_MAX_TIMEOUTS_IN_A_ROW` probes in a row have timed out.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from ratchet.proxy.errors import UpstreamError, UpstreamTimeout, UpstreamUnreachable
from ratchet.proxy.runtime.critical_tasks import CriticalTasks
from ratchet.proxy.upstreams.circuit_breaker import BreakerState
from ratchet.proxy.upstreams.replica_pool import Replica, ReplicaPool

_TIMEOUT = 2.0  # seconds
_MAX_TIMEOUTS_IN_A_ROW = 3
_RETRY_SECONDS = 1.0  # until the next probe of an unreachable replica


_R = TypeVar("_R", bound=Replica)


class ReplicaProbes(Generic[_R]):
    """The background tasks: `check` raises UpstreamError if a replica is down."""

    def __init__(
        self,
        pool: ReplicaPool[_R],
        check: Callable[[_R], Awaitable[object]],
        interval: float,
        critical_tasks: CriticalTasks | None = None,
        *,
        only_if_down: bool = False,
    ) -> None:
        self._pool = pool
        self._check = check
        self._interval = interval
        self._only_if_down = only_if_down
        self._critical_tasks = critical_tasks or CriticalTasks()
        self._timeouts_in_a_row: Counter[str] = Counter()  # by replica
        self._last_errors: dict[str, UpstreamError | None] = {}  # of the latest probe, by replica
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by replica

    async def start(self) -> None:
        """Start probing."""
        await self.follow_pool()

    async def follow_pool(self) -> None:
        """Probe the replicas that the pool has now, and no others."""
        current = {replica.label: replica for replica in self._pool.replicas}
        for label in self._tasks.keys() - current.keys():
            await self._critical_tasks.stop_tasks(self._tasks.pop(label))
        for label in current.keys() - self._tasks.keys():
            watch = self._watch(current[label])
            self._tasks[label] = self._critical_tasks.start_task(watch, f"probe of {label}")

    async def stop(self) -> None:
        """Stop probing."""
        await self._critical_tasks.stop_tasks(*self._tasks.values())

    async def _watch(self, replica: _R) -> None:
        while True:
            state = replica.breaker.state(time.monotonic())
            if state == BreakerState.HALF_OPEN or (state == BreakerState.CLOSED and not self._only_if_down):
                await self.probe(replica)
            await asyncio.sleep(self._seconds_until_next(replica))

    def _seconds_until_next(self, replica: _R) -> float:
        """Return the seconds until the next probe of a replica."""
        open_for = replica.breaker.seconds_until_probe(time.monotonic())
        if open_for is not None:
            return min(self._interval, max(open_for, 0.01))
        error = self._last_errors.get(replica.label)
        return (
            self._interval
            if error is None or isinstance(error, UpstreamTimeout)
            else min(self._interval, _RETRY_SECONDS)
        )

    def last_results(self) -> list[dict[str, Any]]:
        """Return each replica's URL, whether the latest probe succeeded, and its breaker's state."""
        return [self._describe(replica) for replica in self._pool.replicas]

    def _describe(self, replica: _R) -> dict[str, Any]:
        state = replica.breaker.state(time.monotonic())
        error = self._last_errors.get(replica.label)
        reason = None if error is None else str(error)
        if replica.label not in self._last_errors:
            reason = f"upstream {replica.url} has not been probed yet"
        elif reason is None and state != BreakerState.CLOSED:
            reason = f"calls to upstream {replica.url} failed; it is probed again in a few seconds"
        result = {"url": replica.url, "up": reason is None, "in_flight": replica.in_flight, "breaker": str(state)}
        return result | ({"reason": reason} if reason else {})

    async def probe(self, replica: _R) -> None:
        """Probe one replica and update its breaker."""
        error = self._last_errors[replica.label] = await self._probe_once(replica)
        if error is None:
            self._pool.mark_answered(replica)
        elif isinstance(error, UpstreamUnreachable) or (
            isinstance(error, UpstreamTimeout) and self._timeouts_in_a_row[replica.label] >= _MAX_TIMEOUTS_IN_A_ROW
        ):
            self._pool.mark_failed(replica, str(error))

    async def _probe_once(self, replica: _R) -> UpstreamError | None:
        """Probe a replica; return its error, or None."""
        try:
            async with asyncio.timeout(_TIMEOUT):
                await self._check(replica)
        except TimeoutError:
            self._timeouts_in_a_row[replica.label] += 1
            return UpstreamTimeout(f"does not answer within {_TIMEOUT:g} s", url=replica.url)
        except UpstreamError as failure:
            return failure
        self._timeouts_in_a_row.pop(replica.label, None)
        return None
