"""ASGI helpers of every route: read a body, look up a header, send JSON. No routing, no models or calls."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.types import Message, Receive, Scope, Send

from ratchet.proxy.errors import BodyTooLarge, ClientDisconnected, NotFound

JSON = (b"content-type", b"application/json")

TRAJECTORY = "ratchet.trajectory"  # scope keys
DEPLOYMENT = "ratchet.deployment"  # the model that a path of Azure OpenAI names
PATH = "ratchet.path"
KEY_ID = "ratchet.key_id"
HEADERS_BY_NAME = "ratchet.headers"  # cache of `headers_of`; set to None by middleware that changes the headers
CLIENT_LEFT = "ratchet.gone"  # returns whether the client has disconnected, if the server can tell
ANSWER_REPEATED = "ratchet.repeated"  # takes what answers the same request with other bodies, if the server can
CALLER = "ratchet.caller"  # coordinator.keys.key_cache.Caller

_MAX_ADDRESS = 64  # characters; an IPv6 address with a zone is shorter

Headers = list[tuple[bytes, bytes]]


async def read_body(receive: Receive, limit: int) -> bytes:
    """Return the whole request body. Raises BodyTooLarge above `limit` bytes, ClientDisconnected on a disconnect."""
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body"):
        body: bytes = message.get("body", b"")
        if len(body) > limit:
            raise _too_large(limit)
        return body
    parts: list[bytes] = []
    size = 0
    while True:
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)
        message = await receive()


def replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that yields a body that was read already, then all further messages, such as a disconnect."""
    replayed = False

    async def replay() -> Message:
        nonlocal replayed
        if replayed:
            return await receive()
        replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the request body is larger than {limit} bytes (the proxy's setting max_body_bytes)")


def header(scope: Scope, name: bytes) -> str | None:
    """Return a request header (name in lower case) as text; None if absent or empty."""
    value = headers_of(scope).get(name)
    return value.decode("latin-1").strip() or None if value else None


def headers_of(scope: Scope) -> dict[bytes, bytes]:
    """Return the request headers by lower-case name, the first of repeated ones; parsed once per request."""
    found: dict[bytes, bytes] | None = scope.get(HEADERS_BY_NAME)
    if found is None:
        found = scope[HEADERS_BY_NAME] = dict(reversed(scope["headers"]))
    return found


def client_address(scope: Scope) -> str | None:
    """Return the address of the client, behind trusted proxies as they name it; None if the server does not know it."""
    client = scope.get("client")
    return str(client[0])[:_MAX_ADDRESS] if client else None


async def send_bytes(send: Send, status: int, body: bytes, headers: Headers) -> None:
    """Send a complete response; adds the content length to the headers."""
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [*headers, (b"content-length", b"%d" % len(body))],
        }
    )
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, status: int, value: Any, headers: Headers | None = None) -> None:
    """Send a value as JSON."""
    await send_bytes(send, status, msgspec.json.encode(value), [JSON, *(headers or [])])


_ROUTES_HINT = "agents use /v1, operators /api (/api/openapi.json), probes /health/ready, Prometheus /metrics"


def unknown_route_error(scope: Scope) -> NotFound:
    """Return the error for an unknown path; its message lists the routes."""
    return NotFound(f"no route {scope['method']} {scope['path'][:200]}; {_ROUTES_HINT}", code="unknown_route")
