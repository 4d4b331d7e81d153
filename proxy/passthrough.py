"""Everything else under /v1: forwarded and streamed back, not captured.

A `model` in a JSON body is still an alias and becomes the live version's served name; an adapter that the replica does
not have is loaded.

What may pass is a path of one or two plain names: no dots, no percent signs, no empty names, so that what is checked
here is what vLLM sees. The routes that change what vLLM holds or does are not for agents, wherever they stand, and
neither are answers that one replica keeps under an id.
"""

from __future__ import annotations

import asyncio
import re
import string
from urllib.parse import quote_from_bytes

import msgspec
from msgspec import Raw
from starlette.types import Receive, Scope, Send

from proxy.access.limits import HOLD
from proxy.asgi import PATH, TRAJECTORY, header, read_body
from proxy.disconnect import Watch
from proxy.errors import BadRequest, NotFound
from proxy.observing.metrics import Metrics
from proxy.policy import PolicyBook
from proxy.upstreams.adapters import Adapters
from proxy.upstreams.answer import Answer
from proxy.upstreams.connection import HttpAnswer
from proxy.upstreams.pool import Pool, Replica
from proxy.upstreams.upstream import Upstream

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
_OURS = ("connection", "keep-alive", "transfer-encoding", "content-length", "server", "date")


class PassThrough:
    """The endpoint for routes that Ratchet does not know."""

    def __init__(self, book: PolicyBook, upstream: Upstream, pool: Pool, metrics: Metrics, body_limit: int) -> None:
        self._book = book
        self._upstream = upstream
        self._pool = pool
        self._adapters = Adapters(book, upstream, metrics)
        self._body_limit = body_limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _may_pass(scope[PATH]):
            raise NotFound(f"no route {scope['method']} {scope['path'][:200]}", code="unknown_route")
        body = await read_body(receive, self._body_limit)
        if HOLD in scope:
            scope[HOLD].reserve_prompt(body)
        kind = header(scope, b"content-type") or ""
        version = None
        if body and "json" in kind:
            body, version = self._served(body)
        with Watch(receive) as watch:
            try:
                answer = await self._ask(scope, body, version)
                try:
                    kept = [
                        (n.lower().encode(), v.encode()) for n, v in answer.headers.items() if n.lower() not in _OURS
                    ]
                    await send({"type": "http.response.start", "status": answer.status, "headers": kept})
                    async for piece in answer.pieces():
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                    watch.stop()
                    await send({"type": "http.response.body", "body": b""})
                finally:
                    answer.close()
            except asyncio.CancelledError:
                if not watch.left:
                    raise
                watch.forgive()

    async def _ask(self, scope: Scope, body: bytes, version: tuple[str, int] | None) -> Answer:
        """Send the request on; load the adapter of `version` first where the replica does not know it."""
        query = quote_from_bytes(scope["query_string"], safe=string.punctuation)
        path = f"/v1{scope[PATH]}?{query}" if query else f"/v1{scope[PATH]}"
        headers = {name: value for name in ("content-type", "accept") if (value := header(scope, name.encode()))}

        async def ask(replica: Replica) -> HttpAnswer:
            answer = await self._upstream.send(replica.url, scope["method"], path, body or None, headers)
            if version is not None and await self._adapters.load_for(answer, *version):
                answer = await self._upstream.send(replica.url, scope["method"], path, body or None, headers)
            return answer

        return await self._pool.ask(scope[TRAJECTORY] or "", ask)

    def _served(self, body: bytes) -> tuple[bytes, tuple[str, int] | None]:
        """Return the body with its model alias replaced, and (alias, version). Raises BadRequest, NotFound."""
        try:
            fields = msgspec.json.decode(body, type=dict[str, Raw])
            name = msgspec.json.decode(fields["model"], type=str) if "model" in fields else None
        except msgspec.DecodeError as error:
            raise BadRequest(f"the body is not a JSON object with a model name: {error}") from error
        if name is None:
            return body, None
        alias, version = self._book.choose(name)
        version = self._book.live(alias) if version is None else version
        fields["model"] = Raw(msgspec.json.encode(self._book.served(alias, version)))
        return msgspec.json.encode(fields), (alias, version)


def _may_pass(path: str) -> bool:
    names = path.lower().split("/")[1:]
    kept = names[0] == "responses" and len(names) > 1
    return _PLAIN.fullmatch(path) is not None and not kept and _CONTROL.isdisjoint(names)
