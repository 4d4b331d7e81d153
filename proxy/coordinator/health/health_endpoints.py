"""GET /health/live, /health/ready, /health/backlog: for probes and for people. Never needs a key, never blocks.

`live` is for a liveness probe: only a process that hangs fails it, or one that ends because a part of it died. `ready`
is for a readiness probe: it is 503 while a call would not be served, as far as the latest looks at the replicas say; it
asks them nothing, so that nobody can wear them out through it. `backlog` is for alarms: it is 503 while the store is
too far behind, although calls are served and nothing is lost; no probe that restarts anything should ask it.
"""

from __future__ import annotations

import time

from starlette.types import Receive, Scope, Send

from ratchet.proxy.coordinator.shipping.shipper import Shipper
from ratchet.proxy.coordinator.versions.policy_cache import PolicyCache
from ratchet.proxy.journal.journal import Journal
from ratchet.proxy.runtime.critical_tasks import CriticalTasks
from ratchet.proxy.upstreams.replica_pool import Replica
from ratchet.proxy.upstreams.replica_probes import ReplicaProbes
from ratchet.proxy.wire.asgi import send_json


class HealthEndpoints:
    """The three endpoints. `max_lag_seconds`: seconds that the store may be behind."""

    def __init__(
        self,
        policies: PolicyCache,
        probes: ReplicaProbes[Replica],
        journal: Journal,
        shipper: Shipper,
        max_lag_seconds: float,
        critical_tasks: CriticalTasks,
    ) -> None:
        self._policies = policies
        self._probes = probes
        self._journal = journal
        self._shipper = shipper
        self._most_lag = max_lag_seconds
        self._critical_tasks = critical_tasks
        self._started_at = time.time()
        self._stopping = False

    def stop(self) -> None:
        """The proxy was told to stop: from here on it is not ready."""
        self._stopping = True

    async def live(self, scope: Scope, receive: Receive, send: Send) -> None:
        """200 as long as the process answers; 503 with the reason where it ends because a part of it died."""
        reason = self._critical_tasks.failure
        told = {"status": "live"} if reason is None else {"status": "failed", "reason": reason}
        await send_json(send, 200 if reason is None else 503, told)

    async def ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        """200 when a call would be served: by at least one replica; else 503 with what is missing."""
        upstreams = self._probes.last_results()
        missing = [*(["the proxy is stopping"] if self._stopping else ()), *self._policies.readiness_problems()]
        if not any(upstream["up"] for upstream in upstreams):
            missing += [upstream["reason"] for upstream in upstreams]
        status = "not ready" if missing else "ready"
        await send_json(send, 503 if missing else 200, {"status": status, "missing": missing, "upstreams": upstreams})

    async def backlog(self, scope: Scope, receive: Receive, send: Send) -> None:
        """How much of what was recorded is not in the store yet; 503 where it is too old."""
        lag = self.lag()
        behind = lag > self._most_lag
        told = {
            "status": "behind" if behind else "ok",
            "journal_bytes": self._journal.bytes,
            "unshipped_records": self._shipper.backlog,
            "lag_seconds": round(lag, 3),
            "max_lag_seconds": self._most_lag,
        }
        await send_json(send, 503 if behind else 200, told)

    def lag(self) -> float:
        """Return the age in seconds of the oldest record that is not in the store; up to about 1 s too high.

        While records of an earlier process are not there yet, it is at least the time since this one's start.
        """
        now = time.time()
        until = max(self._started_at, self._shipper.shipped_until(now))
        if self._shipper.replayed.is_set() and not self._shipper.backlog:
            return 0.0
        return max(0.0, now - until)
