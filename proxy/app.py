"""Builds the proxy from its settings. `create_app` shows its services in the order in which they start."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from starlette.types import ASGIApp

from ratchet.proxy.coordinator.admission import Admission
from ratchet.proxy.coordinator.conversations.stored_responses import StoredResponses
from ratchet.proxy.coordinator.conversations.token_contexts import TokenContexts
from ratchet.proxy.coordinator.health.health_endpoints import HealthEndpoints
from ratchet.proxy.coordinator.keys.key_cache import KeyCache
from ratchet.proxy.coordinator.limits.rate_limits import KeyMeter
from ratchet.proxy.coordinator.limits.sharing import Sharing
from ratchet.proxy.coordinator.linking.cautious_linker import CautiousLinker, Doubt
from ratchet.proxy.coordinator.linking.restore import LinkingRestore
from ratchet.proxy.coordinator.rollouts.rollout_plans import RolloutPlans
from ratchet.proxy.coordinator.shipping.shipper import Shipper
from ratchet.proxy.coordinator.shipping.store_writer import StoreWriter
from ratchet.proxy.coordinator.versions.base_model_check import BaseModelCheck
from ratchet.proxy.coordinator.versions.base_registration import BaseRegistration
from ratchet.proxy.coordinator.versions.heartbeat import Heartbeat
from ratchet.proxy.coordinator.versions.policy_cache import PolicyCache
from ratchet.proxy.coordinator.worker_sessions import WorkerSessions
from ratchet.proxy.dialects.anthropic_messages import Messages
from ratchet.proxy.dialects.chat import Chat
from ratchet.proxy.dialects.completions import Completions
from ratchet.proxy.dialects.dialect import Dialect
from ratchet.proxy.dialects.responses import Responses
from ratchet.proxy.middleware import WrappedRoutes, wrap_routes
from ratchet.proxy.model_list import FallbackRules
from ratchet.proxy.operator_routes import OperatorRoutes, build_operator_routes
from ratchet.proxy.recording import Recording, build_recording, left_journals
from ratchet.proxy.redaction.redactor import RedactingDialect
from ratchet.proxy.roles import CoordinatorRole, Role, WorkerRole
from ratchet.proxy.runtime.critical_tasks import CriticalTasks
from ratchet.proxy.settings import ProxySettings
from ratchet.proxy.telemetry.metrics import ProxyMetrics
from ratchet.proxy.upstreams.circuit_breaker import CircuitBreaker
from ratchet.proxy.upstreams.replica_pool import Replica, ReplicaPool
from ratchet.proxy.upstreams.replica_probes import ReplicaProbes
from ratchet.proxy.upstreams.replica_watch import ReplicaWatch
from ratchet.proxy.upstreams.vllm_client import Upstream
from ratchet.proxy.worker.call.call_admission import CallAdmission
from ratchet.proxy.worker.call.observer import CallObserver
from ratchet.proxy.worker.call.tracing import CallSpans, make_spans
from ratchet.proxy.worker.coordination.limit_reports import LimitReports
from ratchet.proxy.worker.endpoints.call_endpoint import CallEndpoint, CallLimits
from ratchet.proxy.worker.endpoints.count_tokens import CountTokensEndpoint
from ratchet.proxy.worker.endpoints.models import ModelsEndpoint
from ratchet.proxy.worker.endpoints.passthrough import OUTSIDE_V1, PassThroughEndpoint
from ratchet.proxy.worker.forwarding.exact_forwarder import ExactForwarder
from ratchet.proxy.worker.forwarding.forwarders import Forwarder, ModelRouter, VllmForwarder
from ratchet.proxy.worker.forwarding.other_models import OtherModels
from ratchet.proxy.worker.http.routing import Lifespan, LifespanService, Router
from ratchet.store.access.replicas import ReplicaList
from ratchet.store.store import Store

log = logging.getLogger("ratchet.proxy")


class ProxyApplication(Lifespan):
    """The proxy as an ASGI application."""

    def __init__(
        self,
        app: ASGIApp,
        services: Sequence[LifespanService],
        on_stop: Callable[[], None],
        set_agents: Callable[[Sequence[str]], None],
        on_worker_died: Callable[[str], None] = lambda name: None,
    ) -> None:
        super().__init__(app, services, on_stop)
        self._set_agents = set_agents
        self.on_worker_died = on_worker_died  # called with its name in the event loop's thread, in the coordinator

    def set_agents(self, names: Sequence[str]) -> None:
        """Serve these agents from now on, in the event loop's thread.

        A new agent serves once version 0 is registered, within about a second. An agent that left finishes its calls
        and its open trajectories; a new trajectory gets 404. Raises ValueError for names that cannot be served.
        """
        self._set_agents(names)


class AdmissionServices(NamedTuple):
    """Who decides on the placement of calls, and the services that this needs apart from linking itself.

    `sessions`: with the workers, in a coordinator. `coordinator_url` returns the address of a worker's coordinator.
    """

    admission: CallAdmission
    sessions: WorkerSessions | None
    services: Sequence[LifespanService]
    coordinator_url: Callable[[], str]


class Serving(NamedTuple):
    """From a call to a model: versions, linking, rollouts, replicas."""

    policies: PolicyCache
    heartbeat: Heartbeat
    linker: CautiousLinker
    rollouts: RolloutPlans
    contexts: TokenContexts | None
    pool: ReplicaPool[Replica]
    others: OtherModels
    forwarder: Forwarder
    registration: BaseRegistration
    base_check: BaseModelCheck
    probes: ReplicaProbes[Replica]
    watch: ReplicaWatch


def _others_answer(rules: FallbackRules, serving: Serving) -> bool:
    """Return whether every agent has a fallback for an outage whose model takes calls."""
    fallbacks = [rules.outage.get(alias, ()) for alias in serving.policies.aliases]
    return bool(fallbacks) and all(any(map(serving.others.is_up, names)) for names in fallbacks)


def create_app(
    settings: ProxySettings,
    store: Store,
    upstream: Upstream,
    url: str = "",
    store_writer: StoreWriter | None = None,
    critical_tasks: CriticalTasks | None = None,
    role: Role | None = None,
) -> ProxyApplication:
    """Return the proxy as an ASGI application; its services run from the start of the lifespan to its end.

    Args:
        url: where this proxy is reached; the trainer reads it in the store.
        store_writer: writes the journal's records into the store; by default a thread of this process does.
        critical_tasks: receives the failures of background tasks.
        role: of this process among several; None: it is the whole proxy.
    """
    metrics, critical_tasks = ProxyMetrics(), critical_tasks or CriticalTasks()
    recording = build_recording(settings, store, store_writer, metrics, critical_tasks)
    serving = build_serving(settings, store, upstream, url, recording, metrics, role, critical_tasks)
    spans = make_spans(settings.otlp_endpoint, os.environ)
    limit_reports = LimitReports(max(1, settings.workers)) if isinstance(role, WorkerRole) else None
    keys = KeyCache(settings, store, critical_tasks, sharing=limit_reports)
    health = HealthEndpoints(
        serving.policies,
        serving.probes,
        recording.journal,
        recording.shipper,
        metrics.store,
        settings.max_lag_seconds,
        critical_tasks,
        partial(_others_answer, settings.fallbacks, serving),
    )
    restore = LinkingRestore(serving.linker, store, settings.trajectory_idle_seconds)
    placing = _build_admission(
        settings, store, serving, restore, recording.shipper, metrics, role, limit_reports, critical_tasks
    )
    operators = build_operator_routes(
        settings, store, recording, serving.linker, serving.policies.agent_states, health, metrics, role,
        placing.coordinator_url, critical_tasks,
    )  # fmt: skip
    routes = build_routes(
        settings, store, upstream, recording, serving, operators, health, spans, metrics, placing.admission,
        limit_reports,
    )  # fmt: skip
    wrapped = wrap_routes(routes, settings, keys, placing.sessions, metrics, limit_reports)
    _watch_gauges(metrics, recording, serving, health, wrapped)
    services: list[LifespanService] = [
        *([] if spans is None else [spans]),
        keys,
        upstream,
        serving.others,
        recording.unwritten,
        recording.journal,
        recording.shipper,
        *_earlier_work(settings, store, role, restore, critical_tasks),
        serving.policies,
        *([] if isinstance(role, WorkerRole) else [serving.registration]),
        serving.heartbeat,
        serving.rollouts,
        serving.base_check,
        serving.watch,
        serving.probes,
        *placing.services,
        *operators.services,
    ]
    set_agents, sessions = partial(_set_agents, serving), placing.sessions
    if sessions is None:
        return ProxyApplication(wrapped.app, services, health.stop, set_agents)
    return ProxyApplication(wrapped.app, services, health.stop, set_agents, sessions.end_session)


def _build_admission(
    settings: ProxySettings,
    store: Store,
    serving: Serving,
    restore: LinkingRestore,
    shipper: Shipper,
    metrics: ProxyMetrics,
    role: Role | None,
    limit_reports: LimitReports | None,
    critical_tasks: CriticalTasks,
) -> AdmissionServices:
    """Build what decides on the placement of a call: in this process, or in the coordinator that a worker asks."""
    policies, rollouts, contexts = serving.policies, serving.rollouts, serving.contexts
    if isinstance(role, WorkerRole) and limit_reports is not None:
        remote = role.make_admission(
            settings, store, policies, rollouts, contexts, metrics, limit_reports, lambda: shipper.is_behind,
            critical_tasks,
        )  # fmt: skip
        return AdmissionServices(remote, None, [remote], lambda: remote.coordinator_url)
    local = Admission(policies, serving.linker, rollouts, contexts)
    if not isinstance(role, CoordinatorRole):
        return AdmissionServices(local, None, [], str)
    sessions, needed = role.make_sessions(settings, store, local, serving.linker, restore, critical_tasks)
    return AdmissionServices(local, sessions, [*needed, sessions], str)


def _earlier_work(
    settings: ProxySettings, store: Store, role: Role | None, restore: LinkingRestore, critical_tasks: CriticalTasks
) -> list[LifespanService]:
    """Return the services that take over what earlier processes left: journals, and the trajectories to link."""
    if isinstance(role, WorkerRole):
        if not role.ships_left_journals:
            return []
        folder, workers = settings.journal.parent, {role.name, *role.other_workers}
        return [left_journals(settings, folder, store, workers, critical_tasks)]
    left = left_journals(settings, settings.journal, store, set(role.worker_urls if role else ()), critical_tasks)
    return [left] if role is not None else [left, restore]


def _set_agents(serving: Serving, names: Sequence[str]) -> None:
    serving.policies.set_agents(names)
    serving.base_check.check_again()


def build_serving(
    settings: ProxySettings,
    store: Store,
    upstream: Upstream,
    url: str,
    recording: Recording,
    metrics: ProxyMetrics,
    role: Role | None,
    critical_tasks: CriticalTasks,
) -> Serving:
    """Build what places calls and forwards them to models."""
    linker = CautiousLinker(
        settings.trajectory_idle_seconds, settings.max_linking_bytes, settings.max_linking_bytes // 2
    )
    if not isinstance(role, CoordinatorRole):
        linker.doubt = lambda: Doubt.NONE  # there are no workers whose calls may be missing
    failures, cool_off = settings.breaker_failure_threshold, settings.breaker_reset_seconds
    replicas = [Replica(replica, CircuitBreaker(failures, cool_off)) for replica in upstream.urls]
    pool = ReplicaPool(replicas, metrics)
    others = OtherModels(
        settings.model_list,
        settings.model_keys,
        metrics,
        request_timeout_seconds=settings.request_timeout_seconds,
        stream_idle_timeout_seconds=settings.stream_idle_timeout_seconds,
        failures=failures,
        cool_off=cool_off,
        critical_tasks=critical_tasks,
    )
    policies = PolicyCache(
        settings.agents,
        store,
        metrics,
        other_models=others.names,
        critical_tasks=critical_tasks,
        # the coordinator chooses the versions of a worker's calls; the worker reads those that it does not know
        refresh_seconds=1.0 if isinstance(role, WorkerRole) else 0.2,
    )
    heartbeat = Heartbeat(
        store,
        metrics,
        recording.lookups.instance_id,
        url,
        policies.live_versions,
        policies.live_versions_changed,
        count_pins=lambda now: linker.count_pins(now, settings.version_pin_seconds),
        shipped_until=recording.shipper.shipped_until,
        on_older_store=recording.recorder.forget_durable_messages,
        critical_tasks=critical_tasks,
    )
    vllm = VllmForwarder(policies, upstream, pool, metrics)
    own: Forwarder = vllm
    contexts = None
    if settings.exact_context != "off":
        contexts = TokenContexts(store)
        own = ExactForwarder(own, policies, upstream, pool, contexts, metrics, required=settings.exact_context == "on")
    registration = BaseRegistration(policies, store, upstream, critical_tasks)
    base_check = BaseModelCheck(
        lambda: policies.aliases, store, upstream, vllm.probe_models, critical_tasks=critical_tasks
    )
    probes = ReplicaProbes(pool, base_check.look, min(settings.probe_interval_seconds, cool_off), critical_tasks)
    watch = ReplicaWatch(
        ReplicaList(settings.upstreams), upstream, pool, probes, critical_tasks, failures=failures, cool_off=cool_off
    )
    forwarder = ModelRouter(own, others)
    return Serving(
        policies, heartbeat, linker, RolloutPlans(store), contexts, pool, others, forwarder, registration, base_check,
        probes,
        watch,
    )  # fmt: skip


def build_routes(
    settings: ProxySettings,
    store: Store,
    upstream: Upstream,
    recording: Recording,
    serving: Serving,
    operators: OperatorRoutes,
    health: HealthEndpoints,
    spans: CallSpans | None,
    metrics: ProxyMetrics,
    admission: CallAdmission,
    sharing: Sharing | None,
) -> Router:
    """Return the routes: captured calls, models, health, those of operators, pass-through."""
    policies, redactor = serving.policies, recording.redactor
    observer = CallObserver(metrics, spans, logs_calls=settings.log_calls)
    limits = CallLimits(
        settings.max_body_bytes,
        settings.keep_alive_seconds,
        settings.tool_strict_level,
        lambda model: None if model in policies.other_models else serving.pool.max_context_length(),
        policies.only_agent,
        {
            name: KeyMeter(
                limit.requests_per_minute,
                limit.tokens_per_minute,
                f"agent {name}",
                shared_as=f"agent {name}",
                sharing=sharing,
            )
            for name, limit in settings.agent_limits.items()
        },
        settings.fallbacks,
    )

    def captured(dialect: Dialect) -> CallEndpoint:
        dialect = dialect if redactor is None else RedactingDialect(dialect, redactor)
        return CallEndpoint(dialect, admission, recording.recorder, serving.forwarder, observer, limits)

    count_tokens = CountTokensEndpoint(policies, upstream, serving.pool, serving.rollouts, settings.bounds)
    models = ModelsEndpoint(policies, serving.pool)
    rest = PassThroughEndpoint(policies, upstream, serving.pool, serving.others, metrics, settings.bounds)
    return Router(
        {
            ("POST", "/chat/completions"): captured(Chat(settings.bounds)),
            ("POST", "/completions"): captured(Completions(settings.bounds)),
            ("POST", "/responses"): captured(Responses(recording.conversations, settings.bounds)),
            ("POST", "/messages"): captured(Messages(settings.bounds)),
            ("POST", "/messages/count_tokens"): count_tokens,
            ("GET", "/models"): models,
            **{(method, path): rest for path, method in OUTSIDE_V1.items()},
            ("GET", "/health/live"): health.live,
            **{("GET", path): health.ready for path in ("/health/ready", "/health", "/ping")},
            ("POST", "/ping"): health.ready,
            **operators.routes,
        },
        models=models,
        responses=StoredResponses(store, recording.lookups),
        mounts=operators.mounts,
        rest=rest,
    )


def _watch_gauges(
    metrics: ProxyMetrics, recording: Recording, serving: Serving, health: HealthEndpoints, wrapped: WrappedRoutes
) -> None:
    """Connect the gauges that are read when Prometheus scrapes."""
    linker, conversations = serving.linker, recording.conversations
    metrics.trajectories.set_function(lambda: len(linker))
    metrics.journal_bytes.set_function(lambda: recording.journal.bytes)
    metrics.unshipped.set_function(lambda: recording.shipper.backlog)
    metrics.lag_seconds.set_function(health.lag)
    metrics.watch_policies(serving.policies.list_versions)
    metrics.watch_memory("linking", lambda: linker.bytes)
    metrics.watch_memory("responses", lambda: conversations.size)
    metrics.watch_memory("requests", lambda: wrapped.bodies.bytes)
    metrics.requests_waiting.set_function(lambda: wrapped.parallel.waiting)
