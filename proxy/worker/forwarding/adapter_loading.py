"""Loads an adapter at a replica that does not have it: after vLLM was restarted, or when a replica is new.

The caller learns that it is missing from a 404. Callers at the same time share one load (see `upstream.py`).
"""

from __future__ import annotations

import logging

from ratchet.proxy.coordinator.versions.policy_cache import PolicyCache
from ratchet.proxy.errors import UpstreamError
from ratchet.proxy.telemetry.metrics import Metrics
from ratchet.proxy.upstreams.vllm_client import Upstream
from ratchet.proxy.wire.upstream_response import UpstreamResponse
from ratchet.store.records import BASE_VERSION

log = logging.getLogger("ratchet.proxy")


class AdapterLoader:
    """The adapters of the versions in the policies."""

    def __init__(self, policies: PolicyCache, upstream: Upstream, metrics: Metrics) -> None:
        self._policies = policies
        self._upstream = upstream
        self._metrics = metrics

    async def load_for(self, answer: UpstreamResponse, alias: str, version: int) -> bool:
        """Load a version's adapter where the answer says that it is missing; return whether to send the call again.

        The answer is closed then. Raises UpstreamError.
        """
        if answer.status != 404 or version == BASE_VERSION:
            return False
        folder = await self._policies.adapter_path(alias, version)
        if folder is None:
            return False
        answer.close()
        url = answer.url
        served = self._policies.served_name(alias, version)
        try:
            await self._upstream.load_adapter(url, served, folder)
        except UpstreamError:
            self._metrics.adapter_loads.labels("failed").inc()
            raise
        self._metrics.adapter_loads.labels("loaded").inc()
        log.info("event=adapter_loaded upstream=%s name=%s", url, served)
        return True
