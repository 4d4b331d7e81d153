"""The operators' routes of a process: API, console, metrics, backlog."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from starlette.types import ASGIApp

from ratchet.proxy.coordinator.alarms.alarm_webhook import AlarmWebhook
from ratchet.proxy.coordinator.console.pages import MOUNT, Console, front
from ratchet.proxy.coordinator.health.health_endpoints import HealthEndpoints
from ratchet.proxy.coordinator.linking.linker import TrajectoryLinker
from ratchet.proxy.coordinator.worker_reports import BACKLOG_PATH, METRICS_PATH, WorkerReports
from ratchet.proxy.recording import Recording
from ratchet.proxy.roles import Role, WorkerRole
from ratchet.proxy.runtime.critical_tasks import CriticalTasks
from ratchet.proxy.settings import ProxySettings
from ratchet.proxy.telemetry.metrics import ProxyMetrics
from ratchet.proxy.worker.coordination.coordinator_routes import CoordinatorRoutes
from ratchet.proxy.worker.http.body_memory import BodyLimit
from ratchet.proxy.worker.http.routing import LifespanService
from ratchet.store.store import Store

_MAX_BODY_BYTES = 2**24  # of a request that is forwarded to the coordinator

ReadAgents = Callable[[], Mapping[str, str]]


class OperatorRoutes(NamedTuple):
    """The operators' routes of a process, and the services that they need."""

    routes: Mapping[tuple[str, str], ASGIApp]
    mounts: Mapping[str, ASGIApp]
    services: Sequence[LifespanService]


def build_operator_routes(
    settings: ProxySettings,
    store: Store,
    recording: Recording,
    linker: TrajectoryLinker,
    read_agents: ReadAgents,
    health: HealthEndpoints,
    metrics: ProxyMetrics,
    role: Role | None,
    coordinator_url: Callable[[], str],
    critical_tasks: CriticalTasks,
) -> OperatorRoutes:
    """Return the operators' routes: API, console, metrics, backlog. A worker forwards them to the coordinator."""
    if isinstance(role, WorkerRole):
        return _forwarded_routes(role, coordinator_url, health, metrics)
    # FastAPI and its pydantic models take long to import; the rest of the proxy does not.
    from ratchet.proxy.coordinator.operator_api.audit_log import AuditLog
    from ratchet.proxy.coordinator.operator_api.feedback import BODY_LIMIT, FeedbackIntake
    from ratchet.proxy.coordinator.operator_api.routes import create_operator_api

    feedback = FeedbackIntake(store, recording.journal, recording.lookups, recording.redactor, metrics)
    audit = AuditLog(store, settings.audit_days * 86400, critical_tasks)
    settle = recording.shipper.settle if role is None else recording.lookups.settle
    operator_api = create_operator_api(store, settle, linker, feedback, read_agents, audit)
    mounts: dict[str, ASGIApp] = {"/api": BodyLimit(operator_api, BODY_LIMIT, "/api")}
    routes: dict[tuple[str, str], ASGIApp] = {("GET", "/metrics"): metrics, ("GET", "/health/backlog"): health.backlog}
    if settings.console:
        mounts[MOUNT], routes["GET", "/"] = Console(), front
    services: list[LifespanService] = [AlarmWebhook(settings.alarm_webhook_url, store, metrics), audit]
    if role is not None:
        reports = WorkerReports(role.worker_urls, metrics.registry, health)
        routes["GET", "/metrics"], routes["GET", "/health/backlog"] = reports.metrics, reports.backlog
        services.append(reports)
    return OperatorRoutes(routes, mounts, services)


def _forwarded_routes(
    role: WorkerRole, coordinator_url: Callable[[], str], health: HealthEndpoints, metrics: ProxyMetrics
) -> OperatorRoutes:
    """Return a worker's routes for operators: the coordinator answers.

    Metrics and backlog are the machine's: its own coordinator asks for the worker's part, or a worker asks the others.
    """
    forward = CoordinatorRoutes(coordinator_url, role.token, _MAX_BODY_BYTES)
    routes: dict[tuple[str, str], ASGIApp] = {
        ("GET", "/"): forward,
        ("GET", METRICS_PATH): metrics,
        ("GET", BACKLOG_PATH): health.backlog,
    }
    services: list[LifespanService] = [forward]
    own = role.own_coordinator_url
    if own is not None:
        machine = CoordinatorRoutes(lambda: own, role.token, _MAX_BODY_BYTES)
        routes["GET", "/metrics"] = routes["GET", "/health/backlog"] = machine
        services.append(machine)
    else:
        reports = WorkerReports(role.other_workers, metrics.registry, health, role.name)
        routes["GET", "/metrics"], routes["GET", "/health/backlog"] = reports.metrics, reports.backlog
        services.append(reports)
    return OperatorRoutes(routes, {"/api": forward, MOUNT: forward}, services)
