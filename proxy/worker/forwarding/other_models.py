"""The models of `model_list`: where each is served, with a key and a connection pool of its own.

Promises: what goes there is the client's request under the server's own name of the model; the client's key and ours
never do. Fields that only vLLM knows are added for vLLM alone. A server that refuses our key is our failure, not the
client's: the client gets a 502 that names the variable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ratchet.proxy.errors import UpstreamError
from ratchet.proxy.model_list import ModelEntry, ModelKeys, key_of
from ratchet.proxy.runtime.critical_tasks import CriticalTasks
from ratchet.proxy.telemetry.metrics import Metrics
from ratchet.proxy.upstreams.circuit_breaker import CircuitBreaker
from ratchet.proxy.upstreams.http_connection import HttpResponse
from ratchet.proxy.upstreams.replica_pool import Replica, ReplicaPool
from ratchet.proxy.upstreams.replica_probes import ReplicaProbes
from ratchet.proxy.upstreams.vllm_client import Upstream
from ratchet.proxy.worker.call.active_call import ActiveCall
from ratchet.proxy.worker.forwarding.openai_body import openai_body

_REFUSED = (401, 403)


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
        """Send one request; `path` comes after the base. Raises UpstreamError. Close the answer."""
        answer = await self.client.send(self.url, method, path, body, {**headers, **self.headers})
        if answer.status in _REFUSED:
            answer.close()
            named = f"the key in {self._variable}" if self._variable else "a call without api_key"
            raise UpstreamError(
                f"upstream {self.url} refused {named} with {answer.status}: check it where the proxy is started",
                code="upstream_refused_key",
            )
        return answer


class OtherModels:
    """Every model of the list by its name."""

    def __init__(
        self,
        entries: Sequence[ModelEntry],
        keys: ModelKeys,
        metrics: Metrics,
        *,
        request_timeout_seconds: float,
        connect_timeout_seconds: float,
        stream_idle_timeout_seconds: float,
        max_upstream_response_bytes: int,
        failures: int,
        cool_off: float,
        critical_tasks: CriticalTasks | None = None,
    ) -> None:
        self._clients: dict[float, Upstream] = {}
        self._pools: dict[str, ReplicaPool[Deployment]] = {}
        named: dict[str, list[Deployment]] = {}
        for entry in entries:
            seconds = entry.litellm_params.timeout or request_timeout_seconds
            client = self._clients.setdefault(
                seconds,
                Upstream(
                    (), seconds, connect_timeout_seconds, None, stream_idle_timeout_seconds, max_upstream_response_bytes
                ),
            )
            deployment = Deployment(entry, key_of(entry, keys), client, CircuitBreaker(failures, cool_off))
            named.setdefault(entry.model_name, []).append(deployment)
        for name, deployments in named.items():
            self._pools[name] = ReplicaPool(deployments, metrics)
        self._probes = [
            ReplicaProbes(pool, _is_there, cool_off, critical_tasks, idle=True) for pool in self._pools.values()
        ]

    @property
    def names(self) -> tuple[str, ...]:
        """The names that can be asked for."""
        return tuple(self._pools)

    def pool(self, name: str) -> ReplicaPool[Deployment]:
        """Return where a model is served."""
        return self._pools[name]

    async def start(self) -> None:
        """Open the connection pools."""
        for client in self._clients.values():
            await client.start()
        for probes in self._probes:
            await probes.start()

    async def stop(self) -> None:
        """Close them."""
        for probes in self._probes:
            await probes.stop()
        for client in self._clients.values():
            await client.stop()

    async def forward(self, exchange: ActiveCall, path: str, headers: Mapping[str, str]) -> HttpResponse:
        """Send a captured call on and return its answer. Raises UpstreamError."""
        begun, request = exchange.opened.begun, exchange.request

        async def ask(deployment: Deployment) -> HttpResponse:
            exchange.url = deployment.url
            name = deployment.served_name
            body = request.outgoing(name) if deployment.vllm else openai_body(request, name, begun.dialect)
            sent = {"content-type": "application/json", **(headers if deployment.vllm else {})}
            answer = await deployment.send("POST", path.removeprefix("/v1"), body, sent)
            if request.streamed and answer.status == 200:
                await answer.begin()
            return answer

        return await self._pools[begun.alias].ask(begun.trajectory_id, ask)


async def _is_there(deployment: Deployment) -> None:
    """Ask a server whether it is there; any answer will do. Raises UpstreamError."""
    answer = await deployment.client.send(deployment.url, "GET", "/models", None, deployment.headers)
    answer.close()
    if answer.status >= 500:
        raise UpstreamError(f"upstream {deployment.url} answered {answer.status}")
