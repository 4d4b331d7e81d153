"""Asks every replica from time to time whether it is there, so that a dead one is known before a call meets it.

A replica whose breaker has cooled off is asked, too, and its answer closes the breaker: no agent's call is the
probe. A server that is not ours is asked only for that (`idle`). A slow answer opens nothing, as a replica may be busy;
no connection does, and so does one that hangs: that leaves `_MOST_SILENT` looks in a row without an answer.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from proxy.errors import UpstreamError, UpstreamUnreachable
from proxy.upstreams.breaker import State
from proxy.upstreams.pool import Pool, Replica

_PATIENCE = 2.0  # seconds for an answer
_MOST_SILENT = 3


_R = TypeVar("_R", bound=Replica)


class Probes(Generic[_R]):
    """The service that asks: `ask` raises UpstreamError where a replica is not there."""

    def __init__(
        self, pool: Pool[_R], ask: Callable[[_R], Awaitable[object]], every: float, *, idle: bool = False
    ) -> None:
        self._pool = pool
        self._ask = ask
        self._every = every
        self._idle = idle
        self._silent: Counter[str] = Counter()  # looks in a row without an answer, by replica
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to ask."""
        self._tasks = [asyncio.create_task(self._watch(replica)) for replica in self._pool.replicas]

    async def stop(self) -> None:
        """Ask no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self, replica: _R) -> None:
        while True:
            await asyncio.sleep(self._every)
            state = replica.breaker.state(time.monotonic())
            if state == State.HALF_OPEN or (state == State.CLOSED and not self._idle):
                await self._probe(replica)

    async def look(self) -> list[dict[str, Any]]:
        """Ask all replicas now; return for each where it is, whether it answers, and what its breaker says."""
        return list(await asyncio.gather(*(self._told(replica) for replica in self._pool.replicas)))

    async def _told(self, replica: _R) -> dict[str, Any]:
        reason = await self._probe(replica)
        told = {"url": replica.url, "answers": reason is None, "in_flight": replica.in_flight}
        told["breaker"] = str(replica.breaker.state(time.monotonic()))
        return told | ({"reason": reason} if reason else {})

    async def _probe(self, replica: _R) -> str | None:
        """Ask one replica; return what is wrong with it, or None."""
        try:
            async with asyncio.timeout(_PATIENCE):
                await self._ask(replica)
        except UpstreamUnreachable as error:
            self._pool.failed(replica, str(error))
            return str(error)
        except UpstreamError as error:
            return str(error)
        except TimeoutError:
            reason = f"upstream {replica.url} does not answer within {_PATIENCE:g} s"
            self._silent[replica.label] += 1
            if self._silent[replica.label] >= _MOST_SILENT:
                self._pool.failed(replica, reason)
            return reason
        self._silent.pop(replica.label, None)
        self._pool.answered(replica)
        return None
