"""Looks up records that may not be in the store yet: this proxy or another one recorded them a moment ago.

Promises: a stored record is returned at once. An unknown one costs one read of the store, and a second one if records
from before the request were being shipped. A waiting request holds no thread. While the store hangs, a request ends
with StoreUnavailable `_STORE_SECONDS` after its patience. At most `MAX_WAITING` requests per key
wait (429 above), and `_MAX_WAITING_TOTAL` in total (503). Records of other proxies are awaited with growing pauses:
each proxy writes to the store once a second up to which moment it has shipped. A proxy without heartbeat counts for
a minute.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from ratchet.proxy.coordinator.shipping.held_beginnings import HOLD_SECONDS
from ratchet.proxy.coordinator.shipping.shipper import Shipper
from ratchet.proxy.errors import NotReady, RateLimited
from ratchet.proxy.runtime import thread_pools
from ratchet.store.errors import StoreUnavailable
from ratchet.store.ids import new_id
from ratchet.store.operation_records import ProxyInstance
from ratchet.store.store import Store

MAX_WAITING = 64  # requests of one key
_MAX_WAITING_TOTAL = 1024
_HEARTBEAT_TIMEOUT = 60.0  # seconds
_INSTANCES_CACHE_SECONDS = 0.1  # seconds
_OTHERS_SECONDS = HOLD_SECONDS + 3.0  # beginnings are held so long, and heartbeats come once a second
_STORE_SECONDS = 5.0  # that a request waits for a store that hangs
_FIRST_PAUSE = 0.1  # seconds; each pause is twice the one before

_Found = TypeVar("_Found")


class RecordLookups:
    """Waits for records until they are stored, or until no proxy can have them. Belongs to the loop's thread."""

    def __init__(self, store: Store, shipper: Shipper | None = None) -> None:
        self._store = store
        self._shipper = shipper
        self.instance_id = new_id("proxy")  # this process, in the table of the running proxies
        self._waiting: Counter[str | None] = Counter()  # by key
        self._instances: asyncio.Task[list[ProxyInstance]] | None = None
        self._instances_at = 0.0

    async def wait_for(
        self,
        look: Callable[[], _Found | None],
        key_id: str | None,
        patience: float,
        *,
        ours: bool = True,
        for_call: bool = False,
    ) -> tuple[_Found | None, bool]:
        """Return the result of `look`, and whether every proxy had shipped its records from before this call.

        Args:
            patience: the maximum wait in seconds; with 0, looks once.
            ours: this proxy may have recorded it.
            for_call: a call to a model depends on it.

        Raises what `look` raises, StoreUnavailable, RateLimited, NotReady.
        """
        run = thread_pools.run_call_lookup if for_call else thread_pools.run_lookup
        shipper = self._shipper if ours else None
        try:
            async with asyncio.timeout(patience + _STORE_SECONDS):
                return await self._wait_for(partial(run, look), key_id, patience, shipper)
        except TimeoutError as error:
            raise StoreUnavailable(f"the store has not answered for {_STORE_SECONDS:g} s") from error

    async def _wait_for(
        self,
        look: Callable[[], Awaitable[_Found | None]],
        key_id: str | None,
        patience: float,
        shipper: Shipper | None,
    ) -> tuple[_Found | None, bool]:
        if not patience:
            return await look(), False
        requested_at, until = time.time(), time.monotonic() + patience
        mark = shipper.mark() if shipper else 0
        shipped = shipper is None or shipper.has(mark)
        # Before the look: else a record could arrive in between.
        settled = shipped and await self._others_have_shipped(requested_at)
        found = await look()
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
                settled = shipped and await self._others_have_shipped(requested_at)
                found = await look()
        return found, settled

    async def settle(self, timeout_seconds: float) -> bool:
        """Wait until the store has everything recorded so far; return whether it has what this process recorded.

        The other proxies' records are awaited for `_OTHERS_SECONDS`: one of them may have died.
        """
        requested_at, until = time.time(), time.monotonic() + _OTHERS_SECONDS
        settled = self._shipper is None or await self._shipper.settle(timeout_seconds)
        while settled and time.monotonic() < until and not await self._others_have_shipped(requested_at):
            await asyncio.sleep(_FIRST_PAUSE)
        return settled

    async def _others_have_shipped(self, before: float) -> bool:
        """Return whether every other proxy has shipped its records from before that moment."""
        instances = await self._read_instances()
        return all(instance.shipped_until >= before for instance in instances if instance.id != self.instance_id)

    async def _read_instances(self) -> list[ProxyInstance]:
        """Return the running proxies, cached for `_INSTANCES_CACHE_SECONDS`."""
        if self._instances is None or time.monotonic() - self._instances_at > _INSTANCES_CACHE_SECONDS:
            self._instances_at = time.monotonic()
            self._instances = asyncio.create_task(
                thread_pools.run_lookup(self._store.proxy_instances.running, None, time.time() - _HEARTBEAT_TIMEOUT)
            )
        return await asyncio.shield(self._instances)

    @contextmanager
    def _count_waiter(self, key_id: str | None) -> Iterator[None]:
        """Count a waiting request. Raises RateLimited, NotReady."""
        if self._waiting[key_id] >= MAX_WAITING:
            raise RateLimited(
                f"{MAX_WAITING} requests of this key are waiting for records that are not in the store: request "
                "only ids from this proxy, and retry in a moment",
                code="too_many_waiting",
            )
        if self._waiting.total() >= _MAX_WAITING_TOTAL:
            raise NotReady(f"{_MAX_WAITING_TOTAL} requests wait for records in the store: retry")
        self._waiting[key_id] += 1
        try:
            yield
        finally:
            self._waiting[key_id] -= 1
            if not self._waiting[key_id]:
                del self._waiting[key_id]
