"""Threads by purpose, so that nothing that is slow holds up what is not: each purpose has few, and a queue of its own.

The event loop's default threads are for the start and the stop alone. The keys, policies and rollouts have their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")

_parsing = ThreadPoolExecutor(4, "parsing")
_calls = ThreadPoolExecutor(4, "calls-look-up")
_others = ThreadPoolExecutor(4, "look-up")


async def run_parsing(work: Callable[..., _T], *values: object) -> _T:
    """Return what reading something large gives. Raises what `work` raises."""
    return await asyncio.get_running_loop().run_in_executor(_parsing, work, *values)


async def run_call_lookup(look: Callable[..., _T], *values: object) -> _T:
    """Return what the store says, for a call to a model that goes on from it. Raises what `look` raises."""
    return await asyncio.get_running_loop().run_in_executor(_calls, look, *values)


async def run_lookup(look: Callable[..., _T], *values: object) -> _T:
    """Return what the store says, for any other request. Raises what `look` raises."""
    return await asyncio.get_running_loop().run_in_executor(_others, look, *values)
