"""The proxy, put together. Reading `create_app` is reading the proxy."""

from __future__ import annotations

import asyncio
import logging
import os
import time

from starlette.types import ASGIApp

from ratchet.proxy.coordinator.console.pages import MOUNT, Console, front
from ratchet.proxy.coordinator.conversations.conversation_cache import ConversationCache
from ratchet.proxy.coordinator.conversations.stored_responses import StoredResponses
from ratchet.proxy.coordinator.conversations.token_contexts import TokenContexts
from ratchet.proxy.coordinator.health.health_endpoints import HealthEndpoints
from ratchet.proxy.coordinator.keys.key_cache import KeyCache
from ratchet.proxy.coordinator.linking.linker import TrajectoryLinker
from ratchet.proxy.coordinator.linking.unanswered_attempts import RETRY_WINDOW
from ratchet.proxy.coordinator.operator_api.body_limit import BodyLimit
from ratchet.proxy.coordinator.rollouts.rollout_plans import Rollouts
from ratchet.proxy.coordinator.shipping.record_lookups import RecordLookups
from ratchet.proxy.coordinator.shipping.shipper import Shipper
from ratchet.proxy.coordinator.shipping.store_writer import InProcessWriter, StoreWriter
from ratchet.proxy.coordinator.versions.base_model_check import BaseModelCheck
from ratchet.proxy.coordinator.versions.policy_cache import PolicyCache
from ratchet.proxy.dialects.anthropic_messages import Messages
from ratchet.proxy.dialects.chat import Chat
from ratchet.proxy.dialects.completions import Completions
from ratchet.proxy.dialects.dialect import Dialect
from ratchet.proxy.dialects.responses import Responses
from ratchet.proxy.journal.journal import Journal
from ratchet.proxy.redaction.patterns import RedactionPatterns
from ratchet.proxy.redaction.redactor import RedactingDialect, Redactor
from ratchet.proxy.runtime.critical_tasks import CriticalTasks
from ratchet.proxy.settings import ProxySettings
from ratchet.proxy.telemetry.alarm_queue import AlarmQueue
from ratchet.proxy.telemetry.metrics import Metrics
from ratchet.proxy.upstreams.circuit_breaker import CircuitBreaker
from ratchet.proxy.upstreams.replica_pool import Replica, ReplicaPool
from ratchet.proxy.upstreams.replica_probes import ReplicaProbes
from ratchet.proxy.upstreams.vllm_client import Upstream
from ratchet.proxy.worker.call.observer import CallObserver
from ratchet.proxy.worker.call.recorder import Recorder
from ratchet.proxy.worker.call.tracing import make_spans
from ratchet.proxy.worker.endpoints.call_endpoint import CallEndpoint
from ratchet.proxy.worker.endpoints.count_tokens import CountTokensEndpoint
from ratchet.proxy.worker.endpoints.models import ModelsEndpoint
from ratchet.proxy.worker.endpoints.passthrough import PassThroughEndpoint
from ratchet.proxy.worker.forwarding.exact_forwarder import ExactForwarder
from ratchet.proxy.worker.forwarding.forwarders import Forwarder, ModelRouter, VllmForwarder
from ratchet.proxy.worker.forwarding.other_models import OtherModels
from ratchet.proxy.worker.http.authentication import Authentication
from ratchet.proxy.worker.http.body_memory import BodyMemory
from ratchet.proxy.worker.http.decompression import Decompression
from ratchet.proxy.worker.http.error_middleware import ErrorMiddleware
from ratchet.proxy.worker.http.routing import Lifespan, Router, Service
from ratchet.store.errors import StoreError
from ratchet.store.store import Store

log = logging.getLogger("ratchet.proxy")


def create_app(
    settings: ProxySettings,
    store: Store,
    upstream: Upstream,
    url: str = "",
    store_writer: StoreWriter | None = None,
    critical_tasks: CriticalTasks | None = None,
) -> Lifespan:
    """Return the proxy as an ASGI application; its services run from the lifespan's start to its end.

    `url` is where this proxy is reached; the trainer reads it in the store's doors. `store_writer` brings the journal's
    records into the store; without one a thread of this process does. `critical_tasks` is told where a part of it dies.
    """
    # FastAPI and pydantic's models take a while to import; the proxy's parts do not.
    from ratchet.proxy.coordinator.operator_api.feedback import BODY_LIMIT, FeedbackIntake
    from ratchet.proxy.coordinator.operator_api.routes import create_operator_api

    metrics, alarm_queue, critical_tasks = Metrics(), AlarmQueue(), critical_tasks or CriticalTasks()
    linker = TrajectoryLinker(
        settings.trajectory_idle_seconds, settings.max_linking_bytes, settings.max_linking_bytes_per_key
    )
    journal = Journal(
        settings.journal,
        settings.max_journal_bytes,
        settings.journal_segment_bytes,
        metrics,
        alarm_queue,
        critical_tasks,
    )
    redactor = Redactor(RedactionPatterns(settings.redact, settings.redact_patterns)) if settings.redacts else None
    recorder = Recorder(journal, metrics, strict=settings.capture == "strict", redactor=redactor)
    shipper = Shipper(
        journal,
        store,
        store_writer or InProcessWriter(store),
        metrics,
        alarm_queue,
        recorder.forget_durable_messages,
        lambda: conversations.invalidate_all(),
        critical_tasks,
    )
    lookups = RecordLookups(store, shipper)
    conversations = ConversationCache(
        store, lookups, settings.max_conversation_bytes, settings.max_conversation_bytes_per_key
    )
    responses = Responses(conversations, settings.bounds)
    failures, cool_off = settings.breaker_failure_threshold, settings.breaker_reset_seconds
    replicas = [Replica(replica, CircuitBreaker(failures, cool_off)) for replica in upstream.urls]
    pool = ReplicaPool(replicas, metrics, settings.affinity_slack)
    others = OtherModels(
        settings.model_list,
        settings.model_keys,
        metrics,
        request_timeout_seconds=settings.request_timeout_seconds,
        connect_timeout_seconds=settings.connect_timeout_seconds,
        stream_idle_timeout_seconds=settings.stream_idle_timeout_seconds,
        max_upstream_response_bytes=settings.max_upstream_response_bytes,
        failures=failures,
        cool_off=cool_off,
        critical_tasks=critical_tasks,
    )
    policies = PolicyCache(
        (settings.model,),
        store,
        upstream,
        metrics,
        url,
        pins=lambda now: linker.count_pins(now, settings.version_pin_seconds),
        shipped_until=shipper.shipped_until,
        others=others.names,
        critical_tasks=critical_tasks,
    )
    metrics.trajectories.set_function(lambda: len(linker))
    metrics.journal_bytes.set_function(lambda: journal.bytes)
    metrics.unshipped.set_function(lambda: shipper.backlog)
    metrics.watch_policies(policies.list_versions)
    spans = make_spans(settings.otlp_endpoint, os.environ)
    observer = CallObserver(metrics, spans, logs_calls=settings.log_calls)
    direct = VllmForwarder(policies, upstream, pool, metrics)
    base = BaseModelCheck(settings.model, store, upstream, direct.look, critical_tasks=critical_tasks)
    probes = ReplicaProbes(pool, base.look, min(settings.probe_interval_seconds, cool_off), critical_tasks)
    own: Forwarder = direct
    rollouts = Rollouts(store)
    contexts = None
    if settings.exact_context != "off":
        contexts = TokenContexts(store, settings.max_exact_context_bytes)
        own = ExactForwarder(own, policies, upstream, pool, contexts, metrics, insisted=settings.exact_context == "on")
    forwarder = ModelRouter(own, others)

    def captured(dialect: Dialect) -> CallEndpoint:
        dialect = dialect if redactor is None else RedactingDialect(dialect, redactor)
        return CallEndpoint(dialect, policies, linker, recorder, forwarder, contexts, rollouts, metrics, observer,
                        settings.bounds, settings.keep_alive_seconds, settings.tool_strict_level,
                        pool.longest_context)  # fmt: skip

    models = ModelsEndpoint(policies)
    pages: dict[tuple[str, str], ASGIApp] = {("GET", "/"): front} if settings.console else {}
    console: dict[str, ASGIApp] = {MOUNT: Console()} if settings.console else {}
    health = HealthEndpoints(policies, probes, journal, shipper, settings.max_lag_seconds, critical_tasks)
    metrics.lag_seconds.set_function(health.lag)
    feedback = FeedbackIntake(store, journal, lookups, redactor, metrics)
    routes = Router(
        {
            ("POST", "/chat/completions"): captured(Chat()),
            ("POST", "/completions"): captured(Completions()),
            ("POST", "/responses"): captured(responses),
            ("POST", "/messages"): captured(Messages()),
            ("POST", "/messages/count_tokens"): CountTokensEndpoint(
                policies, upstream, pool, rollouts, settings.bounds
            ),
            ("GET", "/models"): models,
            ("GET", "/metrics"): metrics,
            ("GET", "/health/live"): health.live,
            ("GET", "/health/ready"): health.ready,
            ("GET", "/health/backlog"): health.backlog,
            **pages,
        },
        models=models,
        responses=StoredResponses(store, lookups),
        mounts={
            "/api": BodyLimit(create_operator_api(store, shipper, linker, feedback), BODY_LIMIT, "/api"),
            **console,
        },
        rest=PassThroughEndpoint(policies, upstream, pool, others, metrics, settings.bounds),
    )
    key_cache = KeyCache(settings, store, critical_tasks)
    inflate = Decompression(routes, settings.max_body_bytes)
    bodies = BodyMemory(inflate, settings.max_inflight_request_bytes, settings.max_inflight_request_bytes_per_key)
    app: ASGIApp = ErrorMiddleware(
        Authentication(bodies, key_cache, settings.allowed_origins), count=metrics.count_error
    )
    metrics.watch_memory("linking", lambda: linker.bytes)
    metrics.watch_memory("responses", lambda: conversations.size)
    metrics.watch_memory("requests", lambda: bodies.bytes)
    if settings.allowed_origins:
        from starlette.middleware.cors import CORSMiddleware

        app = CORSMiddleware(
            app, settings.allowed_origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["*"], max_age=600
        )
    memory = Memory(linker, store, settings.trajectory_idle_seconds)
    watching = [] if spans is None else [spans]
    services: list[Service] = [
        *watching,
        key_cache,
        upstream,
        others,
        journal,
        shipper,
        memory,
        policies,
        rollouts,
        base,
        probes,
    ]
    return Lifespan(app, services, on_stop=health.stop)


class Memory:
    """Gives the links their memory back after a restart; a store that does not answer leaves it empty."""

    def __init__(self, linker: TrajectoryLinker, store: Store, idle_seconds: float) -> None:
        self._linker = linker
        self._store = store
        self._idle_seconds = idle_seconds

    async def start(self) -> None:
        """Take up the open answers of the store, once the journal has been replayed into it."""
        now = time.time()
        since = now - self._idle_seconds
        try:
            leaves = await asyncio.to_thread(self._store.resume_state.open_leaves, since)
            attempts = await asyncio.to_thread(
                self._store.resume_state.unanswered_calls, max(since, now - RETRY_WINDOW)
            )
        except StoreError as error:
            log.warning("event=memory_not_restored reason=%r", str(error))
            return
        self._linker.restore_from_store(leaves, now, attempts)

    async def stop(self) -> None:
        """Nothing to end."""
