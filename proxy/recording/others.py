"""What another proxy of the store may hold: looks for a record until it is there, or until nobody can hold it any more.

Each running proxy says once a second in the store's doors up to which moment it has shipped what it recorded. Promises:
with one proxy alone a record that is not there is told at once; a proxy that has stopped talking counts for a minute.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from store import Store

_DOOR_SILENCE = 60.0  # seconds after which another proxy is not counted
_EVERY = 0.1

_Found = TypeVar("_Found")


async def found_or_settled(
    store: Store, look: Callable[[], _Found | None], before: float, patience: float, *, alone: bool = False
) -> tuple[_Found | None, bool]:
    """Return what `look` finds, and whether it is certain that nobody recorded it before that moment.

    Looks in threads, again and again, for `patience` seconds at most; `alone`: also for what this proxy by itself may
    not have shipped. Raises what `look` raises, and StoreUnavailable.
    """
    until = time.monotonic() + patience
    while True:
        settled = await asyncio.to_thread(_settled, store, before, 0 if alone else 1)
        found = await asyncio.to_thread(look)
        if found is not None or settled or time.monotonic() > until:
            return found, settled
        await asyncio.sleep(_EVERY)


def _settled(store: Store, before: float, doors_that_know: int) -> bool:
    doors = store.doors.open(None, time.time() - _DOOR_SILENCE)
    return len(doors) <= doors_that_know or min(door.shipped_until for door in doors) >= before
