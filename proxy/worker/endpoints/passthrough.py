"""All other routes under /v1, and those that vLLM has without it: forwarded and streamed back, not captured.

A `model` in a JSON body is an alias here too: it becomes the served name of the live version, and an adapter that the
replica does not have is loaded. A key that is limited to agents has to name one: vLLM reads the model of any other body
itself.

A path may consist of one or two plain names, without dots, percent signs or empty names, so vLLM sees exactly the path
that was checked. Routes that control vLLM are not forwarded, at any place in the path; neither are responses that one
replica stores under an id. Another model's server, where our key may open more than models, receives only requests for
embeddings and scores.
"""

from __future__ import annotations

import asyncio
import re
import string
from urllib.parse import quote_from_bytes, unquote

import msgspec
from msgspec import Raw
from starlette.types import Receive, Scope, Send

from ratchet.proxy.coordinator.limits.rate_limits import TOKEN_RESERVATION
from ratchet.proxy.coordinator.versions.policy_cache import Access, PolicyCache
from ratchet.proxy.errors import BadRequest, Forbidden, NotFound
from ratchet.proxy.telemetry.metrics import ProxyMetrics
from ratchet.proxy.upstreams.http_connection import HttpResponse
from ratchet.proxy.upstreams.replica_pool import Replica, ReplicaPool
from ratchet.proxy.upstreams.vllm_client import Upstream
from ratchet.proxy.wire.asgi import CALLER, JSON, PATH, TRAJECTORY, header, read_body, send_bytes
from ratchet.proxy.wire.body_bounds import BodyBounds, read_json
from ratchet.proxy.wire.error_shapes import error_shape_of
from ratchet.proxy.wire.unreadable_text import unreadable_body
from ratchet.proxy.wire.upstream_response import UpstreamResponse
from ratchet.proxy.worker.forwarding.forwarders import AdapterLoader
from ratchet.proxy.worker.forwarding.other_models import Deployment, OtherModels
from ratchet.proxy.worker.http.disconnect_watch import DisconnectWatch

_PLAIN = re.compile(r"/[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)?")
_CONTROL = frozenset(
    {
        "load_lora_adapter", "unload_lora_adapter", "pause", "resume", "is_paused", "sleep", "wake_up", "is_sleeping",
        "collective_rpc", "abort_requests", "reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache",
        "release_kv_cache_memory", "start_profile", "stop_profile", "scale_elastic_ep", "is_scaling_elastic_ep",
        "init_weight_transfer_engine", "shutdown_weight_transfer_engine", "start_weight_update", "update_weights",
        "start_draft_weight_update", "finish_weight_update", "update_weight_version", "weight_checker", "weight_info",
        "get_world_size", "server_info", "kv_event_sources", "fault_tolerance",
    }
)  # fmt: skip
OUTSIDE_V1 = {
    "/tokenize": "POST",
    "/detokenize": "POST",
    "/classify": "POST",
    "/pooling": "POST",
    "/version": "GET",
    "/tokenizer_info": "GET",
}  # fmt: skip -- the methods of the routes that vLLM has without /v1 only
_OTHER_MODEL_ROUTES = ("/embeddings", "/rerank", "/score", "/classify", "/pooling", "/moderations")
_KEY_PARAMETERS = ("key", "api_key", "api-key", "apikey", "x-api-key", "access_token", "token", "authorization")
_NO_ROUTE = b'{"detail":"Not Found"}'  # of vLLM's web framework
_OWN_HEADERS = ("connection", "keep-alive", "transfer-encoding", "content-length", "server", "date")


class PassThroughEndpoint:
    """The endpoint of all other routes."""

    def __init__(
        self,
        policies: PolicyCache,
        upstream: Upstream,
        pool: ReplicaPool[Replica],
        others: OtherModels,
        metrics: ProxyMetrics,
        bounds: BodyBounds,
    ) -> None:
        self._policies = policies
        self._others = others
        self._upstream = upstream
        self._pool = pool
        self._adapters = AdapterLoader(policies, upstream, metrics)
        self._bounds = bounds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _may_pass(scope[PATH]):
            raise NotFound(f"no route {scope['method']} {scope['path'][:200]}", code="unknown_route")
        is_json = "json" in (header(scope, b"content-type") or "")
        body = await (read_json(receive, self._bounds) if is_json else read_body(receive, self._bounds.body))
        if TOKEN_RESERVATION in scope:
            scope[TOKEN_RESERVATION].reserve_prompt(body)
        fields, name = _fields(body) if body and is_json else ({}, None)
        if name is not None and "@" in name:
            await self._policies.refresh_if_unknown(name)
        access: Access = scope[CALLER].access
        if access.agents is not None and name is None and body:
            raise Forbidden(
                "the API key is limited to some agents: send a JSON body with the `model`, one of those that GET "
                "/v1/models lists"
            )
        is_other = name in self._policies.other_models
        if is_other and name is not None and not access.has_model(name):
            raise self._policies.unknown_model(name, access)
        if is_other and scope[PATH] not in _OTHER_MODEL_ROUTES:
            raise NotFound(f"no route {scope['path'][:200]} for the model {name}", code="unknown_route")
        with DisconnectWatch(receive) as watch:
            try:
                if name is None:
                    response = await self._forward(scope, body, None)
                elif is_other:
                    response = await self._forward_to_other(scope, fields, name)
                else:
                    response = await self._forward(scope, *self._with_served_name(fields, name, access))
                try:
                    if response.status in (404, 405):
                        await _send_refusal(scope, response, send, watch)
                    else:
                        await _pass_on(response, send, watch)
                finally:
                    response.close()
            except asyncio.CancelledError:
                if not watch.client_left:
                    raise
                watch.uncancel_task()

    async def _forward(self, scope: Scope, body: bytes, version: tuple[str, int] | None) -> UpstreamResponse:
        """Forward the request; load the adapter of `version` if the replica does not have it."""
        above = "" if scope[PATH] in OUTSIDE_V1 else "/v1"
        path, headers = f"{above}{scope[PATH]}{_query(scope)}", _headers(scope)

        async def send(replica: Replica) -> HttpResponse:
            response = await self._upstream.send(replica.url, scope["method"], path, body or None, headers)
            if version is not None and await self._adapters.load_if_missing(response, *version):
                response = await self._upstream.send(replica.url, scope["method"], path, body or None, headers)
            return response

        proven = self._policies.proven_replicas(*version) if version is not None else ()
        return await self._pool.send(scope[TRAJECTORY] or "", send, proven)

    async def _forward_to_other(self, scope: Scope, fields: dict[str, Raw], name: str) -> UpstreamResponse:
        """Forward the request to another model's server, under that server's name of the model."""
        path, headers = f"{scope[PATH]}{_query(scope)}", _headers(scope)

        async def send(deployment: Deployment) -> HttpResponse:
            body = msgspec.json.encode({**fields, "model": Raw(msgspec.json.encode(deployment.served_name))})
            return await deployment.send(scope["method"], path, body, headers)

        return await self._others.pool(name).send("", send)

    def _with_served_name(self, fields: dict[str, Raw], name: str, access: Access) -> tuple[bytes, tuple[str, int]]:
        """Return the body with the served name for its alias, and (alias, version). Raises NotFound, NotReady."""
        alias, version = self._policies.resolve_model(name, access)
        version = self._policies.live_version(alias) if version is None else version
        served = Raw(msgspec.json.encode(self._policies.served_name(alias, version)))
        return msgspec.json.encode({**fields, "model": served}), (alias, version)


async def _pass_on(response: UpstreamResponse, send: Send, watch: DisconnectWatch) -> None:
    """Pass on a response as it arrives."""
    headers = [(n.lower().encode(), v.encode()) for n, v in response.headers.items() if n.lower() not in _OWN_HEADERS]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    async for piece in response.pieces():
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    watch.stop()
    await send({"type": "http.response.body", "body": b""})


async def _send_refusal(scope: Scope, response: UpstreamResponse, send: Send, watch: DisconnectWatch) -> None:
    """Send a 404 or 405 in the API's error format: vLLM's web framework has its own."""
    body = await response.read()
    if body == _NO_ROUTE:
        body = b"no route %s, neither here nor at the server for the model it serves" % scope["path"][:200].encode()
    payload, _ = error_shape_of(scope).encode_upstream_error(response.status, body)
    watch.stop()
    await send_bytes(send, response.status, payload, [JSON])


def _fields(body: bytes) -> tuple[dict[str, Raw], str | None]:
    """Return the fields of a JSON body, and its model. Raises BadRequest."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, Raw])
        return fields, msgspec.json.decode(fields["model"], type=str) if "model" in fields else None
    except msgspec.ValidationError as error:
        raise BadRequest(f"the body is not a JSON object with a model name: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise unreadable_body(body, error) from error


def _query(scope: Scope) -> str:
    """Return the query for the upstream without parameters that may be keys: keys are read from headers only."""
    parts = [part for part in scope["query_string"].split(b"&") if not _is_key(part)]
    query = quote_from_bytes(b"&".join(parts), safe=string.punctuation)
    return f"?{query}" if query else ""


def _is_key(part: bytes) -> bool:
    return unquote(part.partition(b"=")[0].decode("latin-1")).lower() in _KEY_PARAMETERS


def _headers(scope: Scope) -> dict[str, str]:
    return {name: value for name in ("content-type", "accept") if (value := header(scope, name.encode()))}


def _may_pass(path: str) -> bool:
    names = path.lower().split("/")[1:]
    stored = names[0] == "responses" and len(names) > 1  # a response that one replica stores
    return _PLAIN.fullmatch(path) is not None and not stored and _CONTROL.isdisjoint(names)
