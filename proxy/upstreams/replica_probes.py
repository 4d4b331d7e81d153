"""Asks every replica from time to time whether it is there, so that a dead one is known before a call meets it.

What the latest look said is kept for `/health/ready`, which asks nobody. One that cannot be reached is asked again a
second later. One whose breaker has cooled off is asked, too, and its answer closes the breaker: no agent's call is the
probe. A server that is not ours is asked only for that (`idle`). A slow answer opens nothing, as a replica may be
busy; no connection does, and so does one that hangs: that leaves `_MAX_TIMEOUTS_IN_A_ROW` looks in a row without an
answer.
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

_PATIENCE = 2.0  # seconds for an answer
_MAX_TIMEOUTS_IN_A_ROW = 3
_SOON = 1.0  # seconds until the next look at one that cannot be reached


_R = TypeVar("_R", bound=Replica)


class ReplicaProbes(Generic[_R]):
    """The service that asks: `ask` raises UpstreamError where a replica is not there."""

    def __init__(
        self,
        pool: ReplicaPool[_R],
        ask: Callable[[_R], Awaitable[object]],
        every: float,
        critical_tasks: CriticalTasks | None = None,
        *,
        idle: bool = False,
    ) -> None:
        self._pool = pool
        self._ask = ask
        self._every = every
        self._idle = idle
        self._critical_tasks = critical_tasks or CriticalTasks()
        self._timeouts_in_a_row: Counter[str] = Counter()  # looks in a row without an answer, by replica
        self._last_errors: dict[str, UpstreamError | None] = {}  # what the latest look said, by replica
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to ask."""
        self._tasks = [
            self._critical_tasks.start_task(self._watch(replica), f"probe of {replica.label}")
            for replica in self._pool.replicas
        ]

    async def stop(self) -> None:
        """Ask no more."""
        await self._critical_tasks.stop_tasks(*self._tasks)

    async def _watch(self, replica: _R) -> None:
        while True:
            state = replica.breaker.state(time.monotonic())
            if state == BreakerState.HALF_OPEN or (state == BreakerState.CLOSED and not self._idle):
                await self.look(replica)
            await asyncio.sleep(self._pause(replica))

    def _pause(self, replica: _R) -> float:
        """Return the seconds until the next look at a replica."""
        opens_in = replica.breaker.opens_in(time.monotonic())
        if opens_in is not None:
            return min(self._every, max(opens_in, 0.01))
        wrong = self._last_errors.get(replica.label)
        return self._every if wrong is None or isinstance(wrong, UpstreamTimeout) else min(self._every, _SOON)

    def last(self) -> list[dict[str, Any]]:
        """Return of each replica where it is, whether it answered at the latest look, and what its breaker says."""
        return [self._told(replica) for replica in self._pool.replicas]

    def _told(self, replica: _R) -> dict[str, Any]:
        state = replica.breaker.state(time.monotonic())
        wrong = self._last_errors.get(replica.label)
        reason = None if wrong is None else str(wrong)
        if replica.label not in self._last_errors:
            reason = f"upstream {replica.url} has not been asked yet"
        elif reason is None and state != BreakerState.CLOSED:
            reason = f"calls to upstream {replica.url} failed; it is asked again in some seconds"
        told = {"url": replica.url, "answers": reason is None, "in_flight": replica.in_flight, "breaker": str(state)}
        return told | ({"reason": reason} if reason else {})

    async def look(self, replica: _R) -> None:
        """Ask one replica, and tell its breaker."""
        wrong = self._last_errors[replica.label] = await self._asked(replica)
        if wrong is None:
            self._pool.answered(replica)
        elif isinstance(wrong, UpstreamUnreachable) or (
            isinstance(wrong, UpstreamTimeout) and self._timeouts_in_a_row[replica.label] >= _MAX_TIMEOUTS_IN_A_ROW
        ):
            self._pool.failed(replica, str(wrong))

    async def _asked(self, replica: _R) -> UpstreamError | None:
        """Ask one replica; return what is wrong with it, or None."""
        try:
            async with asyncio.timeout(_PATIENCE):
                await self._ask(replica)
        except TimeoutError:
            self._timeouts_in_a_row[replica.label] += 1
            return UpstreamTimeout(f"upstream {replica.url} does not answer within {_PATIENCE:g} s")
        except UpstreamError as error:
            return error
        self._timeouts_in_a_row.pop(replica.label, None)
        return None
