"""GET /health/live, /health/ready, /health/backlog: for probes and for people. Never needs a key, never blocks.

`live` is for a liveness probe: it fails if the process hangs, or exits because a component died. `ready` is for a
readiness probe: it is 503 while a call would not be served, according to the latest probes of the replicas; it sends
them no request of its own. It also answers /health and /ping, by which vLLM's clients check a server. A store that is
down does not count (`store_up`): calls are served. `backlog` is for alarms: it is 503 while the store is too far
behind, although calls are served and nothing is lost. Do not restart anything because of `backlog`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from starlette.types import Receive, Scope, Send

from ratchet.proxy.coordinator.shipping.shipper import Shipper
from ratchet.proxy.coordinator.versions.policy_cache import PolicyCache
from ratchet.proxy.journal.journal import Journal
from ratchet.proxy.runtime.critical_tasks import CriticalTasks
from ratchet.proxy.telemetry.metrics import StoreStatus
from ratchet.proxy.upstreams.replica_pool import Replica
from ratchet.proxy.upstreams.replica_probes import ReplicaProbes
from ratchet.proxy.wire.asgi import send_json


class HealthEndpoints:
    """The three endpoints.

    `max_lag_seconds`: how far the store may be behind. `others_answer`: whether other models answer the calls of every
    agent while its replicas are down.
    """

    def __init__(
        self,
        policies: PolicyCache,
        probes: ReplicaProbes[Replica],
        journal: Journal,
        shipper: Shipper,
        store_status: StoreStatus,
        max_lag_seconds: float,
        critical_tasks: CriticalTasks,
        others_answer: Callable[[], bool],
    ) -> None:
        self._policies = policies
        self._probes = probes
        self._journal = journal
        self._shipper = shipper
        self._store_status = store_status
        self._max_lag_seconds = max_lag_seconds
        self._critical_tasks = critical_tasks
        self._others_answer = others_answer
        self._started_at = time.time()
        self._stopping = False

    def stop(self) -> None:
        """Report not ready from now on: the proxy is stopping."""
        self._stopping = True

    async def live(self, scope: Scope, receive: Receive, send: Send) -> None:
        """200 while the process works; 503 with the reason if it exits because a component died."""
        reason = self._critical_tasks.failure
        body = {"status": "live"} if reason is None else {"status": "failed", "reason": reason}
        await send_json(send, 200 if reason is None else 503, body)

    async def ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        """200 if calls are answered, by a replica or by a fallback for an outage; else 503 with what is missing."""
        upstreams = self._probes.last_results()
        missing = [*(["the proxy is stopping"] if self._stopping else ()), *self._policies.readiness_problems()]
        down = [] if any(upstream["up"] for upstream in upstreams) else [upstream["reason"] for upstream in upstreams]
        is_ready = not missing and (not down or self._others_answer())
        body = {
            "status": ("degraded" if down else "ready") if is_ready else "not ready",
            "missing": [*missing, *down],
            "store_up": self._store_status.is_up,
            "agents": self._policies.agent_states(),
            "upstreams": upstreams,
        }
        await send_json(send, 200 if is_ready else 503, body)

    async def backlog(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Report the records that are not in the store yet; 503 if the oldest is too old."""
        body = self.read_backlog()
        await send_json(send, 503 if body["status"] == "behind" else 200, body)

    def read_backlog(self) -> dict[str, Any]:
        """Return the report of `backlog`."""
        lag = self.lag()
        return {
            "status": "behind" if lag > self._max_lag_seconds else "ok",
            "journal_bytes": self._journal.bytes,
            "unshipped_records": self._shipper.backlog,
            "lost_records": self._shipper.lost,
            "lag_seconds": round(lag, 3),
            "max_lag_seconds": self._max_lag_seconds,
        }

    def lag(self) -> float:
        """Return the age in seconds of the oldest record that is not in the store; up to about 1 s too high.

        While records of an earlier process are missing, it is at least the time since this process started.
        """
        now = time.time()
        until = max(self._started_at, self._shipper.shipped_until(now))
        if self._shipper.replayed.is_set() and not self._shipper.backlog:
            return 0.0
        return max(0.0, now - until)
