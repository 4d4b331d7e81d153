"""Everything else under /v1: forwarded and streamed back, not captured.

A `model` in a JSON body is still an alias and becomes the live version's served name. The routes that change which
adapters vLLM holds are not for agents; responses are the proxy's own, and vLLM knows none of them.
"""

from __future__ import annotations

import asyncio

import msgspec
from msgspec import Raw
from starlette.types import Receive, Scope, Send

from proxy.asgi import PATH, TRAJECTORY, header, read_body
from proxy.disconnect import Watch
from proxy.errors import BadRequest, NotFound
from proxy.policy import PolicyBook
from proxy.upstream import Upstream

_FORBIDDEN = ("/load_lora_adapter", "/unload_lora_adapter", "/responses/")
_OURS = ("connection", "keep-alive", "transfer-encoding", "content-length", "content-encoding", "server", "date")


class PassThrough:
    """The endpoint for routes that Ratchet does not know."""

    def __init__(self, book: PolicyBook, upstream: Upstream, body_limit: int) -> None:
        self._book = book
        self._upstream = upstream
        self._body_limit = body_limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope[PATH]
        if path.startswith(_FORBIDDEN):
            raise NotFound(f"no route {scope['method']} {scope['path']}", code="unknown_route")
        body = await read_body(receive, self._body_limit)
        kind = header(scope, b"content-type") or ""
        if body and "json" in kind:
            body = self._served(body)
        url = self._upstream.place(scope[TRAJECTORY] or "")
        query = f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else ""
        headers = {name: value for name in ("content-type", "accept") if (value := header(scope, name.encode()))}
        with Watch(receive) as watch:
            try:
                answer = await self._upstream.send(url, scope["method"], f"/v1{path}{query}", body or None, headers)
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

    def _served(self, body: bytes) -> bytes:
        """Return the body with its model alias replaced. Raises BadRequest, NotFound."""
        try:
            fields = msgspec.json.decode(body, type=dict[str, Raw])
            name = msgspec.json.decode(fields["model"], type=str) if "model" in fields else None
        except msgspec.DecodeError as error:
            raise BadRequest(f"the body is not a JSON object with a model name: {error}") from error
        if name is None:
            return body
        alias, version = self._book.choose(name)
        served = self._book.served(alias, self._book.live(alias) if version is None else version)
        fields["model"] = Raw(msgspec.json.encode(served))
        return msgspec.json.encode(fields)
