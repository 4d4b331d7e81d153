"""Metrics and backlog of a proxy's workers on one machine: one process asks the others, and answers for all.

That is the coordinator, or, where there is none, any worker. Each sample of a worker has the label `worker`; the
coordinator's own samples have none. A worker that does not answer
is left out of the metrics, and makes the backlog unknown (503).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from starlette.types import Receive, Scope, Send

from ratchet.proxy.coordinator.health.health_endpoints import HealthEndpoints
from ratchet.proxy.errors import UpstreamError
from ratchet.proxy.upstreams.http_client import HttpClient
from ratchet.proxy.upstreams.http_connection import ResponseLimits
from ratchet.proxy.wire.asgi import send_bytes, send_json

log = logging.getLogger("ratchet.proxy")

METRICS_PATH, BACKLOG_PATH = "/metrics/worker", "/health/backlog/worker"  # a worker's own
_TIMEOUT = 5.0  # seconds
_MAX_BYTES = 2**24
_TEXT = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]


class WorkerReports:
    """The endpoints. `urls`: the own address of each of the other workers, by its name. `name`: this worker's."""

    def __init__(
        self, urls: Mapping[str, str], registry: CollectorRegistry, health: HealthEndpoints, name: str | None = None
    ) -> None:
        self._name = name
        self._urls = urls
        self._registry = registry
        self._health = health
        self._client = HttpClient(ResponseLimits(_TIMEOUT, _TIMEOUT, _MAX_BYTES), 1.0, server="the worker")

    async def start(self) -> None:
        """Nothing to start."""

    async def stop(self) -> None:
        """Close the connections."""
        self._client.close()

    async def metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The metrics of all processes."""
        families: dict[str, Metric] = {family.name: family for family in self._registry.collect()}
        if (name := self._name) is not None:
            for family in families.values():
                family.samples = [_of_worker(one, name) for one in family.samples]
        for worker, text in (await self._read(METRICS_PATH)).items():
            for family in text_string_to_metric_families((text or b"").decode()):
                known = families.setdefault(family.name, family)
                if known is family:
                    samples, family.samples = family.samples, []
                else:
                    samples = family.samples
                known.samples += [_of_worker(one, worker) for one in samples]
        await send_bytes(send, 200, generate_latest(_Families(families)), list(_TEXT))

    async def backlog(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The backlog of all journals; 503 if it is too old, or a worker does not answer."""
        own, found = self._health.read_backlog(), await self._read(BACKLOG_PATH)
        reports = [msgspec.json.decode(text) for text in found.values() if text is not None]
        missing = [worker for worker, text in found.items() if text is None]
        lag = max(one["lag_seconds"] for one in [own, *reports])
        behind = lag > own["max_lag_seconds"]
        body = own | {
            "status": "unknown" if missing else "behind" if behind else "ok",
            "journal_bytes": sum(one["journal_bytes"] for one in [own, *reports]),
            "unshipped_records": sum(one["unshipped_records"] for one in [own, *reports]),
            "lost_records": sum(one["lost_records"] for one in [own, *reports]),
            "lag_seconds": lag,
            "missing_workers": missing,
        }
        await send_json(send, 503 if missing or behind else 200, body)

    async def _read(self, path: str) -> dict[str, bytes | None]:
        """Return each worker's answer; None without one."""
        answers = await asyncio.gather(*(self._ask(url, path) for url in self._urls.values()))
        return dict(zip(self._urls, answers, strict=True))

    async def _ask(self, url: str, path: str) -> bytes | None:
        try:
            response = await self._client.send(url, "GET", path, None, {})
            try:
                return await response.read()
            finally:
                response.close()
        except UpstreamError as error:
            log.info("event=worker_unreachable reason=%r", str(error))
            return None


def _of_worker(sample: Sample, worker: str) -> Sample:
    return sample._replace(labels={**sample.labels, "worker": worker})


class _Families:
    """Metric families as a registry that can be written as text."""

    def __init__(self, families: Mapping[str, Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        """Return the families."""
        return list(self._families.values())
