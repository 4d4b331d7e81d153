"""The client's address and scheme, as trusted proxies in front name them in `x-forwarded-for` and `-proto`."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any, cast

from starlette.types import ASGIApp, Receive, Scope, Send

_PEER = "ratchet.peer"  # key in the scope


class TrustedProxies:
    """Middleware. Where `x-forwarded-for` names something else than an address, the client is the peer."""

    def __init__(self, app: ASGIApp, trusted_hosts: list[str]) -> None:
        from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

        self._app = app
        self._read_headers = cast("ASGIApp", ProxyHeadersMiddleware(cast("Any", self._checked), trusted_hosts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[_PEER] = scope.get("client")
        await self._read_headers(scope, receive, send)

    async def _checked(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = scope.get("client")
        if client and not _is_address(client[0]):
            scope["client"] = scope[_PEER]
        await self._app(scope, receive, send)


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
