"""Asks every replica from time to time whether it is there, so that a dead one is known before a call meets it.

A replica whose breaker has cooled off is asked, too, and its answer closes the breaker: no agent's call is the
probe. A slow answer opens nothing, as a replica may be busy; no connection does.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from proxy.errors import UpstreamError, UpstreamUnreachable
from proxy.upstreams.breaker import State
from proxy.upstreams.pool import Pool, Replica
from proxy.upstreams.upstream import Upstream

_PATIENCE = 2.0  # seconds for an answer


class Probes:
    """The service that asks."""

    def __init__(self, pool: Pool, upstream: Upstream, every: float) -> None:
        self._pool = pool
        self._upstream = upstream
        self._every = every
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to ask."""
        self._tasks = [asyncio.create_task(self._watch(replica)) for replica in self._pool.replicas]

    async def stop(self) -> None:
        """Ask no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self, replica: Replica) -> None:
        while True:
            await asyncio.sleep(self._every)
            if replica.breaker.state(time.monotonic()) != State.OPEN:
                await self._probe(replica)

    async def look(self) -> list[dict[str, Any]]:
        """Ask all replicas now; return for each where it is, whether it answers, and what its breaker says."""
        return list(await asyncio.gather(*(self._told(replica) for replica in self._pool.replicas)))

    async def _told(self, replica: Replica) -> dict[str, Any]:
        reason = await self._probe(replica)
        told = {"url": replica.url, "answers": reason is None, "in_flight": replica.in_flight}
        told["breaker"] = str(replica.breaker.state(time.monotonic()))
        return told | ({"reason": reason} if reason else {})

    async def _probe(self, replica: Replica) -> str | None:
        """Ask one replica; return what is wrong with it, or None."""
        try:
            async with asyncio.timeout(_PATIENCE):
                await self._upstream.models(replica.url)
        except UpstreamUnreachable as error:
            self._pool.failed(replica, str(error))
            return str(error)
        except UpstreamError as error:
            return str(error)
        except TimeoutError:
            return f"upstream {replica.url} does not answer within {_PATIENCE:g} s"
        self._pool.answered(replica)
        return None
