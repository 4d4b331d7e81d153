"""Sends a captured call to the server of its model, and returns the response once it has started.

Promises: another replica is tried only while the client has nothing of a response. For a stream, the first piece has
arrived when the response is returned, so a replica that dies before its first token fails no call.

An adapter that a replica does not have is loaded there: after a restart of vLLM, or on a new replica.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

from ratchet.proxy.coordinator.versions.policy_cache import PolicyCache
from ratchet.proxy.errors import UpstreamError
from ratchet.proxy.telemetry.metrics import ProxyMetrics
from ratchet.proxy.upstreams.http_connection import HttpResponse
from ratchet.proxy.upstreams.replica_pool import Replica, ReplicaPool
from ratchet.proxy.upstreams.vllm_client import Upstream
from ratchet.proxy.wire.context_limit import find_context_overflow, max_context_length
from ratchet.proxy.wire.upstream_response import UpstreamResponse
from ratchet.proxy.worker.call.active_call import ActiveCall
from ratchet.store.records import BASE_VERSION, OTHER

log = logging.getLogger("ratchet.proxy")


class Forwarder(Protocol):
    """Sends captured calls to a server."""

    async def forward(self, call: ActiveCall, path: str, headers: Mapping[str, str]) -> UpstreamResponse:
        """Send a call to `path` and return its response; sets `call.url`. Raises UpstreamError."""


class ModelRouter:
    """Forwards calls of trained aliases and calls of other models each to their own forwarder."""

    def __init__(self, own: Forwarder, others: Forwarder) -> None:
        self._own = own
        self._others = others

    async def forward(self, call: ActiveCall, path: str, headers: Mapping[str, str]) -> UpstreamResponse:
        """Send a call to `path` and return its response; sets `call.url`. Raises UpstreamError."""
        forwarder = self._others if call.start.purpose == OTHER else self._own
        return await forwarder.forward(call, path, headers)


class AdapterLoader:
    """Loads adapters that a replica does not have, which its 404 reports. Concurrent callers share one load."""

    def __init__(self, policies: PolicyCache, upstream: Upstream, metrics: ProxyMetrics) -> None:
        self._policies = policies
        self._upstream = upstream
        self._metrics = metrics

    async def load_if_missing(self, response: UpstreamResponse, alias: str, version: int) -> bool:
        """Load a version's adapter if the response says that it is missing; return whether to send the call again.

        The response is closed in that case. Raises UpstreamError.
        """
        if response.status != 404 or version == BASE_VERSION:
            return False
        folder = await self._policies.adapter_path(alias, version)
        if folder is None:
            return False
        response.close()
        url = response.url
        if "://" in folder:  # vLLM's plug-in loads it by name, and has just failed to
            self._metrics.adapter_loads.labels("failed").inc()
            raise UpstreamError(
                f"does not find {alias}@{version} in the adapter store: its plug-in is missing, or its log has the "
                "reason",
                url=url,
            )
        served_name = self._policies.served_name(alias, version)
        try:
            await self._upstream.load_adapter(url, served_name, folder)
        except UpstreamError:
            self._metrics.adapter_loads.labels("failed").inc()
            raise
        self._metrics.adapter_loads.labels("loaded").inc()
        log.info("event=adapter_loaded upstream=%s name=%s", url, served_name)
        return True


class VllmForwarder:
    """Forwards calls to the vLLM replicas."""

    def __init__(
        self, policies: PolicyCache, upstream: Upstream, pool: ReplicaPool[Replica], metrics: ProxyMetrics
    ) -> None:
        self._policies = policies
        self._upstream = upstream
        self._pool = pool
        self._adapters = AdapterLoader(policies, upstream, metrics)

    async def probe_models(self, replica: Replica) -> list[dict[str, Any]]:
        """Return a replica's model cards, and note its base model and longest context. Raises UpstreamError."""
        cards = await self._upstream.models(replica.url)
        roots = (card.get("root") for card in cards if not card.get("parent"))
        replica.root = next((root for root in roots if isinstance(root, str)), None)
        replica.max_model_len = max_context_length(cards)
        return cards

    async def forward(self, call: ActiveCall, path: str, headers: Mapping[str, str]) -> UpstreamResponse:
        """Send a call to `path` and return its response; sets `call.url`. Raises UpstreamError."""
        start = call.start
        overflow = find_context_overflow(call.request, (replica.max_model_len for replica in self._pool.replicas))
        if overflow:
            raise overflow
        body = call.request.outgoing(self._policies.served_name(start.alias, start.version))

        async def send(replica: Replica) -> HttpResponse:
            call.url = replica.url
            response = await self._upstream.post_json(replica.url, path, body, headers)
            if await self._adapters.load_if_missing(response, start.alias, start.version):
                response = await self._upstream.post_json(replica.url, path, body, headers)
            if call.request.streamed and response.status == 200:
                await response.wait_for_body()
            return response

        return await self._pool.send(
            start.trajectory_id,
            send,
            self._policies.proven_replicas(start.alias, start.version),
            call.prefix,
            has_fallback=bool(call.fallbacks.outage),
        )
