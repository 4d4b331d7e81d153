"""Sends a captured call to where its version is served, and gives back the answer when it has begun.

Promises: nothing of an answer has reached the client when another replica is tried; of a stream, the first piece is
here when the answer is given back, so that a replica that dies before its first token costs nobody a call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ratchet.proxy.coordinator.versions.policy_cache import PolicyCache
from ratchet.proxy.telemetry.metrics import Metrics
from ratchet.proxy.upstreams.http_connection import HttpResponse
from ratchet.proxy.upstreams.replica_pool import Replica, ReplicaPool
from ratchet.proxy.upstreams.vllm_client import Upstream
from ratchet.proxy.wire.context_limit import find_context_overflow, longest_context
from ratchet.proxy.wire.upstream_response import UpstreamResponse
from ratchet.proxy.worker.call.active_call import ActiveCall
from ratchet.proxy.worker.forwarding.adapter_loading import AdapterLoader
from ratchet.store.records import OTHER


class Forwarder(Protocol):
    """Where captured calls go."""

    async def forward(self, exchange: ActiveCall, path: str, headers: Mapping[str, str]) -> UpstreamResponse:
        """Send a call to `path` and return its answer; `exchange.url` says where it went. Raises UpstreamError."""


class ModelRouter:
    """To the replicas of our own aliases, or to where another model is served."""

    def __init__(self, own: Forwarder, others: Forwarder) -> None:
        self._own = own
        self._others = others

    async def forward(self, exchange: ActiveCall, path: str, headers: Mapping[str, str]) -> UpstreamResponse:
        """Send a call to `path` and return its answer; `exchange.url` says where it went. Raises UpstreamError."""
        chosen = self._others if exchange.opened.begun.purpose == OTHER else self._own
        return await chosen.forward(exchange, path, headers)


class VllmForwarder:
    """To the vLLM replicas; loads an adapter where one is missing."""

    def __init__(self, policies: PolicyCache, upstream: Upstream, pool: ReplicaPool[Replica], metrics: Metrics) -> None:
        self._policies = policies
        self._upstream = upstream
        self._pool = pool
        self._adapters = AdapterLoader(policies, upstream, metrics)

    async def look(self, replica: Replica) -> list[dict[str, Any]]:
        """Ask a replica whether it is there; return the models that it holds. Raises UpstreamError."""
        cards = await self._upstream.models(replica.url)
        replica.max_model_len = longest_context(cards)
        return cards

    async def forward(self, exchange: ActiveCall, path: str, headers: Mapping[str, str]) -> UpstreamResponse:
        """Send a call to `path` and return its answer; `exchange.url` says where it went. Raises UpstreamError."""
        begun = exchange.opened.begun
        too_long = find_context_overflow(exchange.request, (replica.max_model_len for replica in self._pool.replicas))
        if too_long:
            raise too_long
        body = exchange.request.outgoing(self._policies.served_name(begun.alias, begun.version))

        async def ask(replica: Replica) -> HttpResponse:
            exchange.url = replica.url
            answer = await self._upstream.post_json(replica.url, path, body, headers)
            if await self._adapters.load_for(answer, begun.alias, begun.version):
                answer = await self._upstream.post_json(replica.url, path, body, headers)
            if exchange.request.streamed and answer.status == 200:
                await answer.begin()
            return answer

        return await self._pool.ask(begun.trajectory_id, ask)
