"""Look-ups of what may not be in the store yet: recorded here a moment ago, or by another proxy of the store.

Promises: what is there is told at once; what nobody recorded costs one look, and another where records from before the
question were still on their way; nobody who waits holds a thread, and each key has at most `MOST_WAITING` who do (429;
`_MOST_IN_ALL` of all keys: 503). What other proxies may hold is waited for with growing pauses: each of them says once
a second in the store's instances up to which moment it has shipped what it recorded. With one proxy alone there is
nothing of others to wait for; a proxy that has stopped talking counts for a minute.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from ratchet.proxy.coordinator.shipping.shipper import Shipper
from ratchet.proxy.errors import NotReady, RateLimited
from ratchet.proxy.runtime import thread_pools
from ratchet.store.records import ProxyInstance
from ratchet.store.store import Store

MOST_WAITING = 64  # requests of one key
_MOST_IN_ALL = 1024
_DOOR_SILENCE = 60.0  # seconds after which another proxy is not counted
_INSTANCES_CACHE_SECONDS = 0.1  # seconds that those who wait share one look at the instances
_FIRST_PAUSE = 0.1  # seconds; each pause is twice the one before

_Found = TypeVar("_Found")


class RecordLookups:
    """Looks for records until they are there, or until nobody can hold them any more. Belongs to the loop's thread."""

    def __init__(self, store: Store, shipper: Shipper | None = None) -> None:
        self._store = store
        self._shipper = shipper
        self._waiting: Counter[str | None] = Counter()  # by key
        self._doors: asyncio.Task[list[ProxyInstance]] | None = None
        self._doors_at = 0.0

    async def wait_for(
        self,
        look: Callable[[], _Found | None],
        key_id: str | None,
        patience: float,
        *,
        ours: bool = True,
        for_call: bool = False,
    ) -> tuple[_Found | None, bool]:
        """Return what `look` finds, and whether it is certain that nobody had recorded it when this was asked.

        Waits `patience` seconds at most; 0: looks once. `ours`: it may be this proxy's own. `for_call`: a call to a
        model goes on from it. Raises what `look` raises, StoreUnavailable, RateLimited, NotReady.
        """
        run = thread_pools.run_call_lookup if for_call else thread_pools.run_lookup
        if not patience:
            return await run(look), False
        asked_at, until = time.time(), time.monotonic() + patience
        shipper = self._shipper if ours else None
        mark = shipper.mark() if shipper else 0
        shipped = shipper is None or shipper.has(mark)
        settled = shipped and await self._others_have_shipped(
            asked_at
        )  # before the look: else it might come in between
        found = await run(look)
        if found is not None or settled:
            return found, settled
        with self._count_waiter(key_id):
            pause = _FIRST_PAUSE
            while found is None and not settled and (left := until - time.monotonic()) > 0:
                if shipper is not None and not shipped:
                    shipped = await shipper.settle(left, mark)
                else:
                    await asyncio.sleep(min(pause, left))
                    pause *= 2
                settled = shipped and await self._others_have_shipped(asked_at)
                found = await run(look)
        return found, settled

    async def _others_have_shipped(self, before: float) -> bool:
        """Return whether every other proxy has shipped what it recorded before that moment."""
        instances = await self._read_instances()
        return len(instances) <= 1 or min(instance.shipped_until for instance in instances) >= before

    async def _read_instances(self) -> list[ProxyInstance]:
        """Return the proxies that run; those who ask within `_INSTANCES_CACHE_SECONDS` share a look."""
        if self._doors is None or time.monotonic() - self._doors_at > _INSTANCES_CACHE_SECONDS:
            self._doors_at = time.monotonic()
            self._doors = asyncio.create_task(
                thread_pools.run_lookup(self._store.proxy_instances.running, None, time.time() - _DOOR_SILENCE)
            )
        return await asyncio.shield(self._doors)

    @contextmanager
    def _count_waiter(self, key_id: str | None) -> Iterator[None]:
        """Count one who waits. Raises RateLimited, NotReady."""
        if self._waiting[key_id] >= MOST_WAITING:
            raise RateLimited(
                f"{MOST_WAITING} requests of this key wait already for records that are not in the store: ask only for "
                "ids that this proxy gave, and again in a moment",
                code="too_many_waiting",
            )
        if self._waiting.total() >= _MOST_IN_ALL:
            raise NotReady(f"{_MOST_IN_ALL} requests wait already for records that are not in the store: ask again")
        self._waiting[key_id] += 1
        try:
            yield
        finally:
            self._waiting[key_id] -= 1
            if not self._waiting[key_id]:
                del self._waiting[key_id]
