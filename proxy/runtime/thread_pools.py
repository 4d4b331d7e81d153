"""Thread pools by purpose, each small and with its own queue, so that slow work of one kind delays no other.

The event loop's default executor is for start and stop only. Keys, policies and rollouts have their own threads.

Parsing is fair: of a key one large body is parsed at a time, in the order of arrival, and the next one is that of the
key that has waited longest. Another key's bodies therefore never wait for more than the bodies that run. Work whose
client has left, or whose task was cancelled, is not started.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, TypeVar

from ratchet.proxy.errors import ClientDisconnected

_T = TypeVar("_T")


class Requester(NamedTuple):
    """Who sent a request. `has_left` returns whether that client has disconnected, None if the server cannot tell."""

    key_id: str | None = None
    has_left: Callable[[], bool] | None = None


REQUESTER: ContextVar[Requester] = ContextVar("requester")  # of the request that a task serves
_NOBODY = Requester()


class FairPool:
    """Threads that run one job of each key at a time. Any thread may call."""

    def __init__(self, threads: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(threads, name)
        self._lock = threading.Lock()
        self._free = threads
        self._running: set[str | None] = set()  # keys
        self._waiting: dict[str | None, deque[_ParsingJob]] = {}  # by key, the next one first
        self._started: deque[_ParsingJob] = deque()

    async def run(self, function: Callable[..., _T], *values: object) -> _T:
        """Run a function for the requester of this task. Raises what it raises, ClientDisconnected."""
        # No frame of the traceback may hold the job: it holds the error, and both would stay until a full collection.
        return await asyncio.wrap_future(self._add(_ParsingJob(REQUESTER.get(_NOBODY), function, values)))

    def _add(self, job: _ParsingJob) -> Future[Any]:
        with self._lock:
            self._waiting.setdefault(job.requester.key_id, deque()).append(job)
            self._start_jobs()
        return job.result

    def _start_jobs(self) -> None:
        for key_id in [one for one in self._waiting if one not in self._running][: self._free]:
            self._running.add(key_id)
            self._free -= 1
            self._started.append(self._waiting[key_id].popleft())
            if not self._waiting[key_id]:
                del self._waiting[key_id]
            self._executor.submit(self._run_job)

    def _run_job(self) -> None:
        job = self._started.popleft()
        key_id = job.requester.key_id
        job.run()
        del job
        with self._lock:
            self._running.discard(key_id)
            self._free += 1
            if (jobs := self._waiting.pop(key_id, None)) is not None:
                self._waiting[key_id] = jobs  # behind the keys that wait already
            self._start_jobs()


class _ParsingJob:
    """A function to be called for a requester, and its result."""

    def __init__(self, requester: Requester, function: Callable[..., Any], values: tuple[object, ...]) -> None:
        self.requester = requester
        self.result: Future[Any] = Future()
        self._call = partial(function, *values)

    def run(self) -> None:
        """Call the function, unless nobody waits for it any more. Never raises."""
        if not self.result.set_running_or_notify_cancel():
            return
        try:
            if self.requester.has_left is not None and self.requester.has_left():
                raise ClientDisconnected
            self.result.set_result(self._call())
        except BaseException as error:  # noqa: BLE001 -- it is the caller's
            self.result.set_exception(error)
            del self


_parsing = FairPool(4, "parsing")
_call_lookups = ThreadPoolExecutor(4, "call-lookup")
_lookups = ThreadPoolExecutor(4, "lookup")

run_parsing = _parsing.run  # of a large body


async def run_call_lookup(function: Callable[..., _T], *values: object) -> _T:
    """Run a store lookup that a captured call waits for. Raises what `function` raises."""
    return await asyncio.get_running_loop().run_in_executor(_call_lookups, function, *values)


async def run_lookup(function: Callable[..., _T], *values: object) -> _T:
    """Run a store lookup for any other request. Raises what `function` raises."""
    return await asyncio.get_running_loop().run_in_executor(_lookups, function, *values)
