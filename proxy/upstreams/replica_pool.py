"""The replicas of one model: which one gets a call, and where a call goes if that one fails.

Promises:
- A trajectory stays with the replica that answered its last call, whose prefix cache has it, while that one is healthy
  and not much busier than the others. A new trajectory goes to the replica that trajectories with the same beginning
  prefer, within the same slack, else to one of its own. Calls without a trajectory go to the least busy replica.
- A replica that leaves the list gets no new calls. It stays in the metrics until its running calls have ended.
- A call is retried on another replica only before the first byte of its response: if there is no connection or it
  breaks, on 502, 503 and 504 (a dead vLLM, or a load balancer in front of it), and on 429. Any other response is the
  model's own. A timeout of the whole call is not retried.
- A request that a replica may have started (all but: no connection, 429, 503) is retried once: it may be what killed
  the first replica.
- If all fail, the client gets the first failure, with the time of the next probe if all replicas are down.

A call of a version goes only to replicas that are proven to serve it, as the trainer recorded them with the version.

A replica with an open breaker, or with another base model, gets no calls while another replica is healthy. If none is
healthy, all are tried, unless another model can answer.
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from hashlib import blake2b
from typing import Generic, TypeVar

from ratchet.proxy.errors import UpstreamDisconnected, UpstreamError, UpstreamTimeout, UpstreamUnreachable
from ratchet.proxy.telemetry.metrics import ProxyMetrics
from ratchet.proxy.upstreams.circuit_breaker import CircuitBreaker
from ratchet.proxy.upstreams.http_connection import HttpResponse

log = logging.getLogger("ratchet.proxy")

_DOWN = (502, 503, 504)
_MAY_HAVE_STARTED = (502, 504)  # a load balancer's statuses for a vLLM that had received the request
_FULL = 429
_MAX_ATTEMPTS = 3  # replicas that one call is sent to
_MAX_STARTED = 2  # of them, those that may have started it
_MAX_PLACES = 20_000  # trajectories, least recently used ones are forgotten: 4 MB


class Replica:
    """One server. `in_flight` counts the calls whose responses are open; `label` names it in the metrics."""

    __slots__ = (
        "_on_idle", "breaker", "in_flight", "label", "max_model_len", "root", "serves_other_base_model", "url",
    )  # fmt: skip

    def __init__(self, url: str, breaker: CircuitBreaker, label: str = "") -> None:
        self.url = url
        self.breaker = breaker
        self.label = label or url
        self.in_flight = 0
        self.max_model_len: int | None = None  # tokens; None if unknown
        self.root: str | None = None  # its base model as vLLM names it, a folder or a repository; None if unknown
        self.serves_other_base_model = False  # than the alias has
        self._on_idle: Callable[[], None] | None = None

    def release(self) -> None:
        """Record the end of a call."""
        self.in_flight -= 1
        if self._on_idle is not None and not self.in_flight:
            self._on_idle()

    def drain(self, on_idle: Callable[[], None] | None) -> None:
        """Call `on_idle` when no call is in flight any more; None: the replica gets calls again."""
        self._on_idle = on_idle
        if on_idle is not None and not self.in_flight:
            on_idle()

    def is_up(self) -> bool:
        """Return whether it receives calls."""
        return self.breaker.closed and self._on_idle is None

    def load(self) -> int:
        """Return the calls in flight."""
        return self.in_flight


_R = TypeVar("_R", bound=Replica)


class ReplicaPool(Generic[_R]):
    """The replicas. A trajectory leaves a replica with `slack` more calls than the least busy one."""

    def __init__(self, replicas: Sequence[_R], metrics: ProxyMetrics, slack: int = 16) -> None:
        self.replicas = tuple(replicas)
        self.draining: tuple[_R, ...] = ()  # that left the list, with running calls
        self._slack = slack
        self._metrics = metrics
        self._places: OrderedDict[str, str] = OrderedDict()  # label of the replica that answered last, by trajectory
        for replica in self.replicas:
            metrics.watch_upstream(replica.label, replica.is_up, replica.load)

    def replace(self, replicas: Sequence[_R]) -> None:
        """Use other replicas; calls that run elsewhere finish."""
        left = [replica for replica in self.replicas if replica not in replicas]
        self.draining = (*(replica for replica in self.draining if replica not in replicas), *left)
        self.replicas = tuple(replicas)
        for replica in replicas:
            replica.drain(None)
            self._metrics.watch_upstream(replica.label, replica.is_up, replica.load)
        for replica in left:
            replica.drain(partial(self._drained, replica))

    def _drained(self, replica: _R) -> None:
        replica.drain(None)
        self.draining = tuple(other for other in self.draining if other is not replica)
        self._metrics.forget_upstream(replica.label)
        log.info("event=upstream_drained upstream=%s", replica.label)

    def max_context_length(self) -> int | None:
        """Return the longest context of a replica in tokens; None if unknown."""
        return max((replica.max_model_len or 0 for replica in self.replicas), default=0) or None

    def order(self, trajectory_id: str, proven: Collection[str] = (), prefix: str = "") -> Sequence[_R]:
        """Return the replicas to try for a call, in order. Raises UpstreamUnreachable if none is known.

        `proven` are the URLs that serve the call's version. If all of them have left the list, any replica serves.
        `prefix` names the version and the beginning of the prompt, which other trajectories may share.
        """
        replicas = self.replicas
        if proven:
            replicas = tuple(replica for replica in replicas if replica.url in proven) or replicas
        if not replicas:
            raise UpstreamUnreachable("no replica of vLLM is known: the list of upstreams is empty or cannot be read")
        if len(replicas) == 1:
            return replicas
        right = [replica for replica in replicas if not replica.serves_other_base_model] or replicas
        healthy = [replica for replica in right if replica.breaker.closed] or right
        if not trajectory_id:
            return sorted(healthy, key=lambda replica: replica.in_flight)[:_MAX_ATTEMPTS]
        preferred = sorted(healthy, key=lambda replica: _weight(replica.label, trajectory_id), reverse=True)
        place = self._places.get(trajectory_id)
        if place is None and prefix:
            place = max(healthy, key=lambda replica: _weight(replica.label, prefix)).label
        min_in_flight = min(replica.in_flight for replica in healthy)
        return sorted(
            preferred,
            key=lambda replica: (replica.in_flight - min_in_flight >= self._slack, replica.label != place),
        )[:_MAX_ATTEMPTS]

    async def send(
        self,
        trajectory_id: str,
        send: Callable[[_R], Awaitable[HttpResponse]],
        proven: Collection[str] = (),
        prefix: str = "",
        *,
        has_fallback: bool = False,
    ) -> HttpResponse:
        """Try the replicas in order until one accepts the call. Raises UpstreamError. Close the response.

        `send` sends the call to a given replica; for `proven` and `prefix` see `order`. `has_fallback`: if all replicas
        are known to be down, none is tried: another model answers sooner than they time out.
        """
        if has_fallback and self.replicas and not any(replica.breaker.closed for replica in self.replicas):
            raise UpstreamUnreachable("every replica is down; they are probed, and get calls again when they answer")
        result: HttpResponse | UpstreamError | None = None  # the first failure
        order = self.order(trajectory_id, proven, prefix)
        started = 0  # replicas that may have started it
        for replica in order:
            try:
                outcome: HttpResponse | UpstreamError = await self._send_to(replica, send)
            except BaseException:
                _close(result)
                raise
            reason = self._retry_reason(replica, outcome)
            if reason is None:
                _close(result)
                result = outcome
                if trajectory_id and len(self.replicas) > 1:
                    self._remember(trajectory_id, replica)
                break
            started += _may_have_started(outcome)
            if result is None:
                result = outcome
            else:
                _close(outcome)
            if started == _MAX_STARTED:
                break
            if replica is not order[-1]:
                self._metrics.upstream_retries.labels(reason).inc()
        assert result is not None, "a pool has at least one replica"
        if isinstance(result, UpstreamError):
            result.retry_after = _seconds_until_probe(order)
            raise result
        return result

    async def _send_to(
        self, replica: _R, send: Callable[[_R], Awaitable[HttpResponse]]
    ) -> HttpResponse | UpstreamError:
        """Return the replica's response or error; the call is in flight until the response is closed."""
        replica.in_flight += 1
        try:
            response = await send(replica)
        except UpstreamError as error:
            replica.release()
            return error
        except BaseException:
            replica.release()
            raise
        response.on_close(replica.release)
        return response

    def _retry_reason(self, replica: Replica, outcome: HttpResponse | UpstreamError) -> str | None:
        """Update the breaker; return why to try another replica, or None."""
        if isinstance(outcome, HttpResponse):
            if outcome.status == _FULL:
                return "status_429"
            if outcome.status in _DOWN:
                self.mark_failed(replica, f"it answered {outcome.status}")
                return f"status_{outcome.status}"
            self.mark_answered(replica)
            return None
        if isinstance(outcome, (UpstreamUnreachable, UpstreamDisconnected, UpstreamTimeout)):
            self.mark_failed(replica, str(outcome))
        return None if isinstance(outcome, UpstreamTimeout) else outcome.code or "other"

    def _remember(self, trajectory_id: str, replica: _R) -> None:
        self._places[trajectory_id] = replica.label
        self._places.move_to_end(trajectory_id)
        if len(self._places) > _MAX_PLACES:
            self._places.popitem(last=False)

    def mark_failed(self, replica: Replica, reason: str) -> None:
        """Record a failure of a replica."""
        if replica.breaker.fail(time.monotonic()):
            log.warning("event=upstream_down upstream=%s reason=%r", replica.label, reason)

    def mark_answered(self, replica: Replica) -> None:
        """Record a success of a replica."""
        if replica.breaker.succeed():
            log.info("event=upstream_up upstream=%s", replica.label)


def _may_have_started(outcome: HttpResponse | UpstreamError) -> bool:
    """Return whether the failed replica may have started the request, and failed because of it."""
    if isinstance(outcome, HttpResponse):
        return outcome.status in _MAY_HAVE_STARTED
    return outcome.may_have_started


def _weight(label: str, trajectory_id: str) -> bytes:
    """Rendezvous hashing: the trajectory prefers the replica of the greatest weight, whichever others exist."""
    return blake2b(f"{label}\0{trajectory_id}".encode(), digest_size=8).digest()


def _seconds_until_probe(replicas: Sequence[Replica]) -> int | None:
    """Return the seconds until one of these replicas is probed, rounded up; None if one of them is up."""
    now = time.monotonic()
    waits = [replica.breaker.seconds_until_probe(now) for replica in replicas]
    open_ones = [wait for wait in waits if wait is not None]
    return max(1, math.ceil(min(open_ones))) if open_ones and len(open_ones) == len(waits) else None


def _close(outcome: HttpResponse | UpstreamError | None) -> None:
    if isinstance(outcome, HttpResponse):
        outcome.close()
