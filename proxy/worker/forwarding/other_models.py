"""The models of `model_list`: each with its own server, API key and connection pool.

Promises: the server receives the client's request under its own name of the model, never the client's key. Fields
that only vLLM understands are sent to vLLM only. If a server refuses our key, that is our failure: the client gets a
502 that names the environment variable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from ratchet.proxy.errors import UpstreamError
from ratchet.proxy.model_list import ModelEntry, ModelKeys, key_of
from ratchet.proxy.runtime.critical_tasks import CriticalTasks
from ratchet.proxy.telemetry.metrics import ProxyMetrics
from ratchet.proxy.upstreams.circuit_breaker import CircuitBreaker
from ratchet.proxy.upstreams.http_connection import HttpResponse
from ratchet.proxy.upstreams.replica_pool import Replica, ReplicaPool
from ratchet.proxy.upstreams.replica_probes import ReplicaProbes
from ratchet.proxy.upstreams.vllm_client import Upstream
from ratchet.proxy.wire.request_body import ChatRequest
from ratchet.proxy.worker.call.active_call import ActiveCall

_KEY_REFUSED = (401, 403)
_VLLM_ONLY = (
    "add_generation_prompt", "chat_template_kwargs", "continue_final_message", "ignore_eos", "min_p", "min_tokens",
    "repetition_penalty", "stop_token_ids", "structured_outputs", "thinking_token_budget", "top_k",
)  # fmt: skip
_UNTRANSLATED = ("chat", "completions")  # the dialects that such a server accepts itself

_encode = msgspec.json.Encoder().encode
_messages = msgspec.json.Decoder(list[dict[str, Any]])


class Deployment(Replica):
    """One entry of the list."""

    __slots__ = ("_variable", "client", "headers", "served_name", "vllm")

    def __init__(self, entry: ModelEntry, key: str | None, client: Upstream, breaker: CircuitBreaker) -> None:
        params = entry.litellm_params
        super().__init__(params.base, breaker, label=f"{entry.model_name} {params.base}")
        self.client = client
        self.served_name = params.served_name
        self.vllm = params.kind == "vllm"
        self.headers = {"authorization": f"Bearer {key}"} if key else {}
        self._variable = params.variable

    async def send(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> HttpResponse:
        """Send one request; `path` is relative to the base URL. Raises UpstreamError. Close the response."""
        response = await self.client.send(self.url, method, path, body, {**headers, **self.headers})
        if response.status in _KEY_REFUSED:
            response.close()
            sent = f"the key in {self._variable}" if self._variable else "a call without api_key"
            raise UpstreamError(
                f"refused {sent} with {response.status}: check it where the proxy is started",
                url=self.url,
                code="upstream_refused_key",
            )
        return response


class OtherModels:
    """The deployments of the list, pooled by model name."""

    def __init__(
        self,
        entries: Sequence[ModelEntry],
        keys: ModelKeys,
        metrics: ProxyMetrics,
        *,
        request_timeout_seconds: float,
        stream_idle_timeout_seconds: float,
        failures: int,
        cool_off: float,
        critical_tasks: CriticalTasks | None = None,
    ) -> None:
        self._clients: dict[float, Upstream] = {}
        self._pools: dict[str, ReplicaPool[Deployment]] = {}
        by_name: dict[str, list[Deployment]] = {}
        for entry in entries:
            seconds = entry.litellm_params.timeout or request_timeout_seconds
            client = self._clients.setdefault(
                seconds,
                Upstream((), seconds, None, stream_idle_timeout_seconds),
            )
            deployment = Deployment(entry, key_of(entry, keys), client, CircuitBreaker(failures, cool_off))
            by_name.setdefault(entry.model_name, []).append(deployment)
        for name, deployments in by_name.items():
            self._pools[name] = ReplicaPool(deployments, metrics)
        self._probes = [
            ReplicaProbes(pool, _probe, cool_off, critical_tasks, only_if_down=True) for pool in self._pools.values()
        ]

    @property
    def names(self) -> tuple[str, ...]:
        """The model names."""
        return tuple(self._pools)

    def pool(self, name: str) -> ReplicaPool[Deployment]:
        """Return the deployments of a model."""
        return self._pools[name]

    def is_up(self, name: str) -> bool:
        """Return whether a deployment of a model takes calls, as far as is known."""
        return any(deployment.breaker.closed for deployment in self._pools[name].replicas)

    async def start(self) -> None:
        """Start the clients and probes."""
        for client in self._clients.values():
            await client.start()
        for probes in self._probes:
            await probes.start()

    async def stop(self) -> None:
        """Stop the probes and close the connections."""
        for probes in self._probes:
            await probes.stop()
        for client in self._clients.values():
            await client.stop()

    async def forward(self, call: ActiveCall, path: str, headers: Mapping[str, str]) -> HttpResponse:
        """Forward a captured call and return its response. Raises UpstreamError."""
        start, request = call.start, call.request

        async def send(deployment: Deployment) -> HttpResponse:
            call.url = deployment.url
            name = deployment.served_name
            body = request.outgoing(name) if deployment.vllm else openai_body(request, name, start.dialect)
            sent_headers = {"content-type": "application/json", **(headers if deployment.vllm else {})}
            response = await deployment.send("POST", path.removeprefix("/v1"), body, sent_headers)
            if request.streamed and response.status == 200:
                await response.wait_for_body()
            return response

        return await self._pools[start.alias].send(
            start.trajectory_id, send, prefix=call.prefix, has_fallback=bool(call.fallbacks.outage)
        )


def openai_body(request: ChatRequest, served_name: str, dialect: str) -> bytes:
    """Return the body for a server that accepts only OpenAI's fields.

    Chat and text completions keep what the client wrote. From translated dialects, fields that only vLLM understands
    are removed. A stream always includes usage, which is recorded.
    """
    fields = {**request.fields, "model": Raw(_encode(served_name))}
    fields.pop("return_token_ids", None)
    if dialect not in _UNTRANSLATED:
        for name in _VLLM_ONLY:
            fields.pop(name, None)
        messages = _messages.decode(fields["messages"])
        fields["messages"] = Raw(_encode([_without_reasoning(message) for message in messages]))
    if request.streamed:
        fields["stream_options"] = Raw(_encode({**request.stream_options, "include_usage": True}))
    return _encode(fields)


def _without_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != "reasoning"}


async def _probe(deployment: Deployment) -> None:
    """Check that a server responds; any status below 500 will do. Raises UpstreamError."""
    response = await deployment.client.send(deployment.url, "GET", "/models", None, deployment.headers)
    response.close()
    if response.status >= 500:
        raise UpstreamError(f"answered {response.status}", url=deployment.url)
