"""Forwards the operators' routes from a worker to the coordinator: API, console, metrics, backlog.

The worker has checked the request's origin; the coordinator checks its key.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import Receive, Scope, Send

from ratchet.proxy.errors import NotReady, UpstreamError
from ratchet.proxy.messages.coordinator_messages import TOKEN_HEADER
from ratchet.proxy.upstreams.http_client import HttpClient
from ratchet.proxy.upstreams.http_connection import ResponseLimits
from ratchet.proxy.wire.asgi import client_address, read_body, send_bytes

_LIMITS = ResponseLimits(60.0, 60.0, 2**28)
_NOT_PASSED_ON = frozenset(
    (b"host", b"connection", b"content-length", b"transfer-encoding", b"accept-encoding", b"origin", b"referer",
     b"sec-fetch-site", b"expect", b"upgrade", b"x-forwarded-for", b"x-forwarded-proto")
)  # fmt: skip
_OWN_HEADERS = frozenset(("connection", "keep-alive", "transfer-encoding", "content-length", "server", "date"))


class CoordinatorRoutes:
    """The endpoint of these routes. `url` returns the coordinator's; `max_bytes`: of a request's body."""

    def __init__(self, url: Callable[[], str], token: str, max_bytes: int) -> None:
        self._url = url
        self._token = token
        self._max_bytes = max_bytes
        self._client = HttpClient(_LIMITS, 1.0, server="the coordinator")

    async def start(self) -> None:
        """Nothing to start."""

    async def stop(self) -> None:
        """Close the connections."""
        self._client.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(receive, self._max_bytes)
        path = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
        if scope["query_string"]:
            path = f"{path}?{scope['query_string'].decode('latin-1')}"
        headers = {n.decode("latin-1"): v.decode("latin-1") for n, v in scope["headers"] if n not in _NOT_PASSED_ON}
        if (client := client_address(scope)) is not None:
            headers["x-forwarded-for"] = client  # the coordinator trusts its workers
        headers[TOKEN_HEADER] = self._token
        try:
            response = await self._client.send(self._url(), scope["method"], path, body or None, headers)
            try:
                answer = await response.read()
            finally:
                response.close()
        except UpstreamError as error:
            raise NotReady("the proxy's coordinator is starting again; retry in a moment") from error
        own = [(n.encode(), v.encode("latin-1")) for n, v in response.headers.items() if n not in _OWN_HEADERS]
        await send_bytes(send, response.status, answer, own)
