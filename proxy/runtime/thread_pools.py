"""Thread pools by purpose, each small and with its own queue, so that slow work of one kind delays no other.

The event loop's default executor is for start and stop only. Keys, policies and rollouts have their own threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")

_parsing = ThreadPoolExecutor(4, "parsing")
_call_lookups = ThreadPoolExecutor(4, "call-lookup")
_lookups = ThreadPoolExecutor(4, "lookup")


async def run_parsing(function: Callable[..., _T], *values: object) -> _T:
    """Run the parsing of a large body. Raises what `function` raises."""
    return await asyncio.get_running_loop().run_in_executor(_parsing, function, *values)


async def run_call_lookup(function: Callable[..., _T], *values: object) -> _T:
    """Run a store lookup that a captured call waits for. Raises what `function` raises."""
    return await asyncio.get_running_loop().run_in_executor(_call_lookups, function, *values)


async def run_lookup(function: Callable[..., _T], *values: object) -> _T:
    """Run a store lookup for any other request. Raises what `function` raises."""
    return await asyncio.get_running_loop().run_in_executor(_lookups, function, *values)
