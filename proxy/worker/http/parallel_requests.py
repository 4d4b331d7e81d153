"""Limits the requests that run at once, per key and in all. A request above a limit waits in a bounded queue.

Promises:
- A request that would exceed a limit waits until another one has ended, at most `max_seconds`. It is refused at once if
  its key's queue or the whole queue is full: 429 for the key's limit, 503 for the proxy's, both with `retry-after`.
- Within a key the first that waits runs first. Between keys, the next is of the key with the fewest running requests,
  so that one key with many requests does not keep the others waiting.
- A waiting request holds no part of its body but what the connection has buffered.

It counts requests that may reach a model: every POST of an agent. Without limits a request costs one comparison.
Several workers count together: each reports its running requests, and between two answers begins at most an Nth of a
limit, at least one. So N workers run at most N - 1 Nths of it more than the limit, or N - 1 requests if that is more,
until enough have ended: a worker that has had no request under a limit has no answer before its first one begins. Above
its Nth, a request waits for the next answer, which takes about a millisecond. Several proxies count each for itself.
All state belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from starlette.types import ASGIApp, Receive, Scope, Send

from ratchet.proxy.coordinator.keys.key_cache import Caller
from ratchet.proxy.coordinator.limits.sharing import Sharing
from ratchet.proxy.errors import ClientDisconnected, NotReady, ProxyError, RateLimited
from ratchet.proxy.messages.limit_records import RUNNING, Amount
from ratchet.proxy.wire.asgi import CALLER, CLIENT_LEFT
from ratchet.store.ids import owner

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


class _Running:
    """The running requests under one limit, of this worker and the others. `on_answer`: called when those are known."""

    __slots__ = ("_on_answer", "_others", "_owner", "_sharing", "_started", "_started_before", "limit", "number")

    def __init__(self, owner: str, sharing: Sharing | None, on_answer: Callable[[], None]) -> None:
        self._owner = owner
        self._sharing = sharing
        self._on_answer = on_answer
        self.limit: int | None = None
        self.number = 0
        self._others = 0
        self._started = 0  # since the last answer
        self._started_before = 0  # of those, before the report that is under way

    @property
    def is_full(self) -> bool:
        """Whether the limit is reached."""
        if self.limit is None:
            return False
        if self._sharing is None or self._sharing.parts == 1:
            return self.number + self._others >= self.limit
        return self.number >= max(1, self.limit // self._sharing.parts)

    @property
    def may_begin(self) -> bool:
        """Whether another request may begin now."""
        if self.limit is None or self._sharing is None:
            return not self.is_full
        return not self.is_full and self._started < max(1, self.limit // self._sharing.workers)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to remember."""
        return not (self.number or self._started or self._others)

    def change(self, number: int) -> None:
        """Count requests that begin or end. Other workers learn at once that one ended while the limit was reached."""
        was_full = self.is_full
        self.number += number
        self._started += max(0, number) if self._sharing is not None and self.limit is not None else 0
        self.ask(urgent=was_full and number < 0)

    def ask(self, *, urgent: bool = False) -> None:
        """Learn how many requests the other workers run."""
        if self._sharing is not None and self.limit is not None:
            self._sharing.on_use(self, urgent=urgent)

    # --- Counted ----------------------------------------------------------------------------------------------

    def report(self, now: float) -> Amount:
        self._started_before = self._started
        return Amount(self._owner, RUNNING, 0, 0.0, self.number)

    def adopt(self, level: float, now: float) -> None:
        self._others = int(level)
        self._started -= self._started_before
        self._on_answer()

    def restore(self, amount: Amount) -> None:
        self._on_answer()


class _Key:
    """The requests of one key; it exists while there are some."""

    __slots__ = ("name", "queue", "running")

    def __init__(self, name: str, running: _Running) -> None:
        self.name = name
        self.running = running
        self.queue: deque[_Waiting] = deque()


class ParallelRequests:
    """The middleware. `sharing`: of the limits with other workers."""

    def __init__(self, app: ASGIApp, limits: QueueLimits, sharing: Sharing | None = None) -> None:
        self._app = app
        self._limits = limits
        self._sharing = sharing
        self._keys: dict[str, _Key] = {}
        self._arrived = 0
        self._all = _Running("", sharing, self._on_answer)
        self._all.limit = limits.max_parallel
        self.waiting = 0

    @property
    def running(self) -> int:
        """The running requests of this process."""
        return self._all.number

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
            key = self._keys[name] = _Key(name, _Running(f"key {name}", self._sharing, self._on_answer))
        key.running.limit = caller.max_parallel_requests
        return key

    def _may_run(self, key: _Key) -> bool:
        return self._all.may_begin and key.running.may_begin

    def _begin(self, key: _Key) -> None:
        key.running.change(1)
        self._all.change(1)

    def _end(self, key: _Key) -> None:
        key.running.change(-1)
        self._all.change(-1)
        self._run_next()
        self._forget(key)

    async def _wait(self, key: _Key, has_left: Callable[[], bool] | None) -> None:
        """Return once the request counts as running. Raises RateLimited, NotReady, ClientDisconnected."""
        limits, loop = self._limits, asyncio.get_running_loop()
        if self._is_queue_full(key):
            self._drop_abandoned()
        if self._is_queue_full(key):
            self._forget(key)
            raise self._refusal(key, "the queue is full")
        self._keys[key.name] = key
        self._arrived += 1
        waiting = _Waiting(self._arrived, loop.create_future(), has_left)
        key.queue.append(waiting)
        self.waiting += 1
        self._ask(key, urgent=True)
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

    def _is_queue_full(self, key: _Key) -> bool:
        if self._sharing is not None and self._sharing.parts == 1:
            return False  # it waits for an answer, which may say that others have ended
        return self.waiting >= self._limits.max_waiting or len(key.queue) >= self._limits.max_waiting_per_key

    def _ask(self, key: _Key, *, urgent: bool) -> None:
        key.running.ask(urgent=urgent)
        self._all.ask(urgent=urgent)

    def _on_answer(self) -> None:
        """The other workers' requests are known."""
        self._run_next()
        for key in list(self._keys.values()):
            if key.queue:
                self._ask(key, urgent=not (self._all.is_full or key.running.is_full))
                self._drop_excess(key)
            self._forget(key)

    def _drop_excess(self, key: _Key) -> None:
        """Refuse the newest requests, if they waited for an answer and there is no place for them in the queue."""
        while key.queue and (self._all.is_full or key.running.is_full) and (
            self.waiting > self._limits.max_waiting or len(key.queue) > self._limits.max_waiting_per_key
        ):  # fmt: skip
            waiting = key.queue[-1]
            if not waiting.may_run.done():
                waiting.may_run.set_exception(self._refusal(key, "the queue is full"))
            self._remove(key, waiting)

    def _run_next(self) -> None:
        """Let requests run that wait, as far as the limits allow."""
        while self.waiting and self._all.may_begin:
            ready = [key for key in self._keys.values() if key.queue and key.running.may_begin]
            if not ready:
                return
            key = min(ready, key=lambda one: (one.running.number, one.queue[0].number))
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
        if key.running.is_idle and not key.queue:
            self._keys.pop(key.name, None)

    def _refusal(self, key: _Key, reason: str) -> ProxyError:
        """Return the error of a request that may not run; `reason` says why it does not wait any longer."""
        if key.running.is_full:
            return RateLimited(
                f"the key's limit of {key.running.limit} parallel requests is reached and {reason}: retry when others "
                "have ended, or raise the limit (the key's max_parallel_requests, or the proxy's setting "
                "max_parallel_requests_per_key)",
                code="too_many_parallel_requests",
            )
        return NotReady(
            f"the proxy's limit of {self._limits.max_parallel} parallel requests is reached and {reason}: retry when "
            "others have ended (the proxy's settings max_parallel_requests, max_waiting_requests and "
            "max_waiting_seconds)",
            code="too_many_parallel_requests",
        )
