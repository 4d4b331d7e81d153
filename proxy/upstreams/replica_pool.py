"""The replicas of one model: which of them a call goes to, and where it goes when that one cannot take it.

Promises: a trajectory always comes to the same replica, whose prefix cache knows it, as long as that one is healthy and
not much busier than the others; calls without a trajectory go to the least busy one. A call goes to another replica
only before the first byte of its answer: when there is no connection, when it breaks off before then, on 502, 503 and
504 (a dead vLLM, or what stands before it), and on 429, as another replica may have room. Any other answer is the
model's own. A request that a replica may have begun (all but: no connection, 429, 503) is offered to one other replica
at most: it may be what ended the first. When all fail, the first failure is told, as it came, and, where
all are known to be down, when they are asked again. A time-out of the whole call is not tried again.

A replica with an open breaker gets no calls while another is healthy; where none is, all are tried. So it is with one
that serves another base model.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from hashlib import blake2b
from typing import Generic, TypeVar

from ratchet.proxy.errors import UpstreamDisconnected, UpstreamError, UpstreamTimeout, UpstreamUnreachable
from ratchet.proxy.telemetry.metrics import Metrics
from ratchet.proxy.upstreams.circuit_breaker import CircuitBreaker
from ratchet.proxy.upstreams.http_connection import HttpResponse

log = logging.getLogger("ratchet.proxy")

_DEAD = (502, 503, 504)
_BEGUN = (502, 504)  # what stands before a vLLM says of one that had the request
_FULL = 429
_MOST_ATTEMPTS = 3  # replicas that one call is offered to
_MOST_BEGUN = 2  # those of them that may have begun with it


class Replica:
    """One server. `in_flight` counts the calls whose answers have not ended; `label` names it in the metrics."""

    __slots__ = ("breaker", "in_flight", "label", "max_model_len", "serves_other_base_model", "url")

    def __init__(self, url: str, breaker: CircuitBreaker, label: str = "") -> None:
        self.url = url
        self.breaker = breaker
        self.label = label or url
        self.in_flight = 0
        self.max_model_len: int | None = None  # tokens, as far as it has told
        self.serves_other_base_model = False  # it serves another base model than the alias's

    def release(self) -> None:
        """A call is over."""
        self.in_flight -= 1

    def is_up(self) -> bool:
        """Return whether calls go here."""
        return self.breaker.closed

    def load(self) -> int:
        """Return the calls in flight."""
        return self.in_flight


_R = TypeVar("_R", bound=Replica)


class ReplicaPool(Generic[_R]):
    """The replicas. `slack`: a trajectory leaves a replica that has so many more calls than the least busy one."""

    def __init__(self, replicas: Sequence[_R], metrics: Metrics, slack: int = 16) -> None:
        self.replicas = tuple(replicas)
        self._slack = slack
        self._metrics = metrics
        for replica in self.replicas:
            metrics.watch_upstream(replica.label, replica.is_up, replica.load)

    def longest_context(self) -> int | None:
        """Return the tokens of the longest context that a replica has told."""
        return max((replica.max_model_len or 0 for replica in self.replicas), default=0) or None

    def order(self, trajectory_id: str) -> Sequence[_R]:
        """Return the replicas that a call is offered to, one after the other."""
        if len(self.replicas) == 1:
            return self.replicas
        right = [replica for replica in self.replicas if not replica.serves_other_base_model] or self.replicas
        healthy = [replica for replica in right if replica.breaker.closed] or right
        if not trajectory_id:
            return sorted(healthy, key=lambda replica: replica.in_flight)[:_MOST_ATTEMPTS]
        own = sorted(healthy, key=lambda replica: _weight(replica.label, trajectory_id), reverse=True)
        least = min(replica.in_flight for replica in healthy)
        return sorted(own, key=lambda replica: replica.in_flight - least >= self._slack)[:_MOST_ATTEMPTS]

    async def ask(self, trajectory_id: str, ask: Callable[[_R], Awaitable[HttpResponse]]) -> HttpResponse:
        """Offer a call to one replica after the other until one takes it. Raises UpstreamError. Close the answer.

        `ask` sends the call to the replica that it is given.
        """
        told: HttpResponse | UpstreamError | None = None  # the first failure
        order = self.order(trajectory_id)
        begun = 0  # replicas that may have begun with it
        for replica in order:
            try:
                outcome: HttpResponse | UpstreamError = await self._offer(replica, ask)
            except BaseException:
                _close(told)
                raise
            reason = self._judge(replica, outcome)
            if reason is None:
                _close(told)
                told = outcome
                break
            begun += _may_have_started(outcome)
            if told is None:
                told = outcome
            else:
                _close(outcome)
            if begun == _MOST_BEGUN:
                break
            if replica is not order[-1]:
                self._metrics.upstream_retries.labels(reason).inc()
        assert told is not None, "a pool has at least one replica"
        if isinstance(told, UpstreamError):
            told.retry_after = _asked_again_in(order)
            raise told
        return told

    async def _offer(self, replica: _R, ask: Callable[[_R], Awaitable[HttpResponse]]) -> HttpResponse | UpstreamError:
        """Return the replica's answer, or why there is none; it counts as busy until the answer is closed."""
        replica.in_flight += 1
        try:
            answer = await ask(replica)
        except UpstreamError as error:
            replica.release()
            return error
        except BaseException:
            replica.release()
            raise
        answer.on_close(replica.release)
        return answer

    def _judge(self, replica: Replica, outcome: HttpResponse | UpstreamError) -> str | None:
        """Tell the breaker what came of a call; return why another replica should be asked, or None."""
        if isinstance(outcome, HttpResponse):
            if outcome.status == _FULL:
                return "status_429"
            if outcome.status in _DEAD:
                self.failed(replica, f"it answered {outcome.status}")
                return f"status_{outcome.status}"
            self.answered(replica)
            return None
        if isinstance(outcome, (UpstreamUnreachable, UpstreamDisconnected, UpstreamTimeout)):
            self.failed(replica, str(outcome))
        return None if isinstance(outcome, UpstreamTimeout) else outcome.code or "other"

    def failed(self, replica: Replica, reason: str) -> None:
        """Take note that a replica is not well."""
        if replica.breaker.fail(time.monotonic()):
            log.warning("event=upstream_down upstream=%s reason=%r", replica.label, reason)

    def answered(self, replica: Replica) -> None:
        """Take note that a replica is well."""
        if replica.breaker.succeed():
            log.info("event=upstream_up upstream=%s", replica.label)


def _may_have_started(outcome: HttpResponse | UpstreamError) -> bool:
    """Return whether a replica that failed may have begun with the request, and have failed because of it."""
    if isinstance(outcome, HttpResponse):
        return outcome.status in _BEGUN
    return outcome.may_have_begun


def _weight(label: str, trajectory_id: str) -> bytes:
    """Rendezvous hashing: the replica of the greatest weight is the trajectory's own, whichever others there are."""
    return blake2b(f"{label}\0{trajectory_id}".encode(), digest_size=8).digest()


def _asked_again_in(replicas: Sequence[Replica]) -> int | None:
    """Return the whole seconds until one of these replicas is probed; None while calls go to one of them."""
    now = time.monotonic()
    waits = [replica.breaker.opens_in(now) for replica in replicas]
    open_ones = [wait for wait in waits if wait is not None]
    return max(1, math.ceil(min(open_ones))) if open_ones and len(open_ones) == len(waits) else None


def _close(outcome: HttpResponse | UpstreamError | None) -> None:
    if isinstance(outcome, HttpResponse):
        outcome.close()
