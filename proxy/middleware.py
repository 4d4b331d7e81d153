"""What every request passes before its route, from the outside in: addresses, CORS, errors, sessions, keys, limits."""

from __future__ import annotations

from typing import NamedTuple

from starlette.types import ASGIApp

from ratchet.proxy.coordinator.keys.key_cache import KeyCache
from ratchet.proxy.coordinator.worker_sessions import WorkerSessions
from ratchet.proxy.settings import ProxySettings
from ratchet.proxy.telemetry.metrics import ProxyMetrics
from ratchet.proxy.worker.coordination.limit_reports import LimitReports
from ratchet.proxy.worker.http.authentication import Authentication
from ratchet.proxy.worker.http.body_memory import BodyMemory
from ratchet.proxy.worker.http.decompression import Decompression
from ratchet.proxy.worker.http.error_middleware import ErrorMiddleware
from ratchet.proxy.worker.http.parallel_requests import ParallelRequests, QueueLimits
from ratchet.proxy.worker.http.trusted_proxies import TrustedProxies


class WrappedRoutes(NamedTuple):
    """The routes behind all middleware, and the middleware that gauges read."""

    app: ASGIApp
    bodies: BodyMemory
    parallel: ParallelRequests


def wrap_routes(
    routes: ASGIApp,
    settings: ProxySettings,
    keys: KeyCache,
    sessions: WorkerSessions | None,
    metrics: ProxyMetrics,
    limit_reports: LimitReports | None,
) -> WrappedRoutes:
    """Return the routes behind the middleware. `sessions`: a coordinator's; `limit_reports`: a worker's."""
    bodies = BodyMemory(
        Decompression(routes, settings.max_body_bytes),
        settings.max_inflight_request_bytes,
        max(settings.max_inflight_request_bytes // 2, settings.max_body_bytes),
    )
    parallel = ParallelRequests(
        bodies,
        QueueLimits(
            settings.max_parallel_requests,
            settings.max_waiting_requests,
            settings.max_waiting_requests_per_key,
            settings.max_waiting_seconds,
        ),
        limit_reports,
    )
    app: ASGIApp = Authentication(parallel, keys, settings.allowed_origins)
    app = ErrorMiddleware(app if sessions is None else sessions.wrap(app), count=metrics.count_error)
    if settings.allowed_origins:
        from starlette.middleware.cors import CORSMiddleware

        app = CORSMiddleware(
            app, settings.allowed_origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["*"], max_age=600
        )
    if settings.trusted_proxies:
        app = TrustedProxies(app, settings.trusted_hosts)
    return WrappedRoutes(app, bodies, parallel)
