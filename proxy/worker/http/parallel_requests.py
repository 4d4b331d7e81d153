"""Limits the requests that run at once, per key and in all. A request above a limit waits in a bounded queue.

Promises:
- A request that would exceed a limit waits until another one has ended, at most `max_seconds`. It is refused at once if
  its key's queue or the whole queue is full: 429 for the key's limit, 503 for the proxy's, both with `retry-after`.
- Within a key the first that waits runs first. Between keys, the next is of the key with the fewest running requests,
  so that one key with many requests does not keep the others waiting.
- A waiting request holds no part of its body but what the connection has buffered.

It counts requests that may reach a model: every POST of an agent. Without limits a request costs one comparison. Each
proxy process counts its own requests. All state belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from starlette.types import ASGIApp, Receive, Scope, Send

from ratchet.proxy.coordinator.keys.key_cache import Caller
from ratchet.proxy.errors import ClientDisconnected, NotReady, ProxyError, RateLimited
from ratchet.proxy.wire.asgi import CALLER, CLIENT_LEFT
from ratchet.store.access.ownership import owner

_OPERATOR_API = "/api/"


class QueueLimits(NamedTuple):
    """The proxy's own limits. `max_parallel`: requests that run at once, None: no limit; the rest is of the queue."""

    max_parallel: int | None
    max_waiting: int
    max_waiting_per_key: int
    max_seconds: float


class _Waiting(NamedTuple):
    number: int  # in the order of arrival
    may_run: asyncio.Future[None]
    has_left: Callable[[], bool] | None


class _Key:
    """The requests of one key; it exists while there are some."""

    __slots__ = ("limit", "name", "queue", "running")

    def __init__(self, name: str) -> None:
        self.name = name
        self.limit: int | None = None
        self.running = 0
        self.queue: deque[_Waiting] = deque()

    @property
    def is_full(self) -> bool:
        """Whether the key's own limit is reached."""
        return self.limit is not None and self.running >= self.limit


class ParallelRequests:
    """The middleware."""

    def __init__(self, app: ASGIApp, limits: QueueLimits) -> None:
        self._app = app
        self._limits = limits
        self._keys: dict[str, _Key] = {}
        self._arrived = 0
        self.running = 0
        self.waiting = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller: Caller = scope[CALLER]
        unlimited = caller.max_parallel_requests is None and self._limits.max_parallel is None
        if unlimited or scope["method"] != "POST" or scope["path"].startswith(_OPERATOR_API):
            await self._app(scope, receive, send)
            return
        key = self._key_of(caller)
        if self._may_run(key):
            self._begin(key)
        else:
            await self._wait(key, scope.get(CLIENT_LEFT))
        try:
            await self._app(scope, receive, send)
        finally:
            self._end(key)

    def _key_of(self, caller: Caller) -> _Key:
        # Without keys everyone has one owner: made-up keys do not multiply the limit.
        name = owner(caller.key_id)
        key = self._keys.get(name)
        if key is None:
            key = self._keys[name] = _Key(name)
        key.limit = caller.max_parallel_requests
        return key

    @property
    def _is_full(self) -> bool:
        return self._limits.max_parallel is not None and self.running >= self._limits.max_parallel

    def _may_run(self, key: _Key) -> bool:
        return not self._is_full and not key.is_full

    def _begin(self, key: _Key) -> None:
        key.running += 1
        self.running += 1

    def _end(self, key: _Key) -> None:
        key.running -= 1
        self.running -= 1
        self._run_next()
        self._forget(key)

    async def _wait(self, key: _Key, has_left: Callable[[], bool] | None) -> None:
        """Return once the request counts as running. Raises RateLimited, NotReady, ClientDisconnected."""
        limits, loop = self._limits, asyncio.get_running_loop()
        if self.waiting >= limits.max_waiting or len(key.queue) >= limits.max_waiting_per_key:
            self._drop_abandoned()
        if self.waiting >= limits.max_waiting or len(key.queue) >= limits.max_waiting_per_key:
            self._forget(key)
            raise self._refusal(key, "the queue is full")
        self._keys[key.name] = key
        self._arrived += 1
        waiting = _Waiting(self._arrived, loop.create_future(), has_left)
        key.queue.append(waiting)
        self.waiting += 1
        timer = loop.call_later(limits.max_seconds, self._expire, key, waiting)
        try:
            await waiting.may_run
        except asyncio.CancelledError:
            if waiting.may_run.cancelled() or waiting.may_run.exception() is not None:
                self._remove(key, waiting)
            else:  # it was to run in this turn of the loop
                self._end(key)
            raise
        finally:
            timer.cancel()
        if has_left is not None and has_left():
            self._end(key)
            raise ClientDisconnected

    def _run_next(self) -> None:
        """Let requests run that wait, as far as the limits allow."""
        while self.waiting and not self._is_full:
            ready = [key for key in self._keys.values() if key.queue and not key.is_full]
            if not ready:
                return
            key = min(ready, key=lambda one: (one.running, one.queue[0].number))
            waiting = key.queue.popleft()
            self.waiting -= 1
            if not waiting.may_run.done():
                self._begin(key)
                waiting.may_run.set_result(None)

    def _expire(self, key: _Key, waiting: _Waiting) -> None:
        if not waiting.may_run.done():
            waiting.may_run.set_exception(self._refusal(key, f"it waited {self._limits.max_seconds:g} s"))
            self._remove(key, waiting)

    def _drop_abandoned(self) -> None:
        """Remove the requests whose clients have disconnected."""
        for key in list(self._keys.values()):
            for waiting in [one for one in key.queue if one.has_left is not None and one.has_left()]:
                if not waiting.may_run.done():
                    waiting.may_run.set_exception(ClientDisconnected())
                self._remove(key, waiting)

    def _remove(self, key: _Key, waiting: _Waiting) -> None:
        if waiting in key.queue:
            key.queue.remove(waiting)
            self.waiting -= 1
        self._forget(key)

    def _forget(self, key: _Key) -> None:
        if not key.running and not key.queue:
            self._keys.pop(key.name, None)

    def _refusal(self, key: _Key, reason: str) -> ProxyError:
        """Return the error of a request that may not run; `reason` says why it does not wait any longer."""
        if key.is_full:
            return RateLimited(
                f"the key's limit of {key.limit} parallel requests is reached and {reason}: retry when others have "
                "ended, or raise the limit (the key's max_parallel_requests, or the proxy's setting "
                "max_parallel_requests_per_key)",
                code="too_many_parallel_requests",
            )
        return NotReady(
            f"the proxy's limit of {self._limits.max_parallel} parallel requests is reached and {reason}: retry when "
            "others have ended (the proxy's settings max_parallel_requests, max_waiting_requests and "
            "max_waiting_seconds)",
            code="too_many_parallel_requests",
        )
