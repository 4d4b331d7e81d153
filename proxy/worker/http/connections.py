"""uvicorn's HTTP protocol with limits on heads, slow clients and the number of connections.

Why a subclass of uvicorn's protocol: uvicorn has none of these limits, and it writes head and body of a response
separately. One write for both saves 10 to 14 us of CPU per call (benchmarks/RESULTS.md, of 439 us in all). A protocol
of our own on httptools could save 14 us more, 3%, and would have to reimplement the rest of HTTP: not worth it. The
subclass depends on uvicorn's internals (`RequestResponseCycle`, `STATUS_LINE`): tests/proxy/test_connections.py fails
if a release changes them.

Promises:
- The head of a request, and everything else that is not body, is at most `MAX_HEAD_BYTES` bytes (431).
- A request must arrive within `read_timeout_seconds`, plus 1 s per `MIN_BYTES_PER_SECOND` bytes (408).
- A client that does not read its response is disconnected after `write_timeout_seconds`; until then uvicorn's buffer
  limit applies.
- Above `max_connections`, a new connection gets 503 and is closed. A refusal at this level closes the connection.
- The cost per request is a few comparisons: one task checks all connections every second; no timer per request.
- A response of known length is one write. The last message of a response whose client has disconnected raises
  ClientDisconnected, so an unsent response does not count as sent.

Does not limit bodies (`asgi.read_body`) or the duration of a response (`request_timeout_seconds`).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Awaitable
from enum import Enum
from typing import Any

from starlette.types import ASGIApp, Message
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from ratchet.proxy.errors import ClientDisconnected, openai_error
from ratchet.proxy.wire.asgi import CLIENT_LEFT

log = logging.getLogger("ratchet.proxy")

MAX_HEAD_BYTES = 64 * 1024
MIN_BYTES_PER_SECOND = 10_000

_MAX_CHUNK_OVERHEAD = 8  # bytes of framing per byte of a chunked body
_LINGER_SECONDS = 5.0  # for the rest of a body that was answered before its end
_CHECK_INTERVAL = 1.0  # seconds
_FIRST_REQUEST_SECONDS = 2.0  # for the first request of a connection that was accepted just before the server stops
_NEXT_REQUEST_SECONDS = 0.5  # for a later one, which may have been sent before its client can know
_NO_LINGER = struct.pack("ii", 1, 0)

_REASONS = {
    408: "Request Timeout",
    400: "Bad Request",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


_UPGRADE = b"\nupgrade:"
_HEAD_END = b"\n\r\n"


def _without_upgrade(data: bytes) -> tuple[bytes, bytes]:
    """Return bytes of a request's head with its `upgrade` header renamed, which RFC 9110 lets a server ignore.

    The parser would treat the body as the other protocol. Java's HTTP client and `curl --http2` offer h2c with every
    request. The new name has the same length. The second value is the end of `data` that cannot be decided yet: it may
    be the beginning of such a header, or of the head's end.
    """
    end = data.find(_HEAD_END, 0, MAX_HEAD_BYTES)
    head = data[: end + 1 if end >= 0 else MAX_HEAD_BYTES].lower()
    place = head.find(_UPGRADE)
    while place >= 0:
        data = data[: place + 1] + b"offered" + data[place + 8 :]
        place = head.find(_UPGRADE, place + 8)
    if end < 0 and (last := head.rfind(b"\n")) >= 0 and len(head) == len(data):
        rest = head[last:]
        if _UPGRADE.startswith(rest) or _HEAD_END.startswith(rest):
            return data[:last], data[last:]
    return data, b""


class ReceivePhase(Enum):
    IDLE = 0  # no byte of the next request has arrived
    RECEIVING = 1  # part of a request has arrived
    RECEIVED = 2  # the request is complete; its response is in progress or sent


class ClientConnections:
    """The open connections of one server, and their limits."""

    def __init__(self, max_connections: int, read_timeout_seconds: float, write_timeout_seconds: float) -> None:
        self.max_connections = max_connections
        self.read_timeout_seconds = read_timeout_seconds
        self.write_timeout_seconds = write_timeout_seconds
        self._open: set[ClientConnection] = set()

    def add(self, connection: ClientConnection) -> bool:
        """Add a connection; return False if there are too many."""
        if len(self._open) >= self.max_connections:
            return False
        self._open.add(connection)
        return True

    def remove(self, connection: ClientConnection) -> None:
        """Remove a connection."""
        self._open.discard(connection)

    async def close_slow(self) -> None:
        """Close slow connections until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(_CHECK_INTERVAL, self.read_timeout_seconds / 4, self.write_timeout_seconds / 4))
            now = loop.time()
            for connection in list(self._open):
                self._check(connection, now)

    def _check(self, connection: ClientConnection, now: float) -> None:
        """Check one connection; if the check fails, abort it."""
        try:
            connection.check(now)
        except Exception:
            log.exception("event=connection_not_checked")
            self._open.discard(connection)
            connection.transport.abort()


class ClientConnection(HttpToolsProtocol):
    """One connection. Times are on the loop's clock."""

    def __init__(
        self,
        connections: ClientConnections,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        **more: Any,
    ) -> None:
        super().__init__(config, server_state, app_state, **more)
        self._connections = connections
        self._phase = ReceivePhase.IDLE
        self._since = self.loop.time()
        self._stalled_at: float | None = None
        self._lingers_since = 0.0
        self._in_head = True  # or before the head
        self._undecided = b""  # bytes of the head that were not parsed yet
        self._received = 0  # bytes of this request
        self._body_bytes = 0  # of its body
        self._is_stopping = False

    def shutdown(self) -> None:
        """Close after the response in progress; while idle, wait a moment for a request that is on its way."""
        self._is_stopping = True
        if self.cycle is None:
            self.loop.call_later(_FIRST_REQUEST_SECONDS, self._close_unused)
        elif self.cycle.response_complete:
            self.loop.call_later(_NEXT_REQUEST_SECONDS, self._close_unused)
        else:
            super().shutdown()

    def _close_unused(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._connections.add(self):
            self._refuse(
                503,
                f"this proxy has its max_connections ({self._connections.max_connections}) open; retry later",
                retry=True,
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._received += len(data)
        if self._in_head:
            data, self._undecided = _without_upgrade(self._undecided + data)
        super().data_received(data)
        if (
            self._received - _MAX_CHUNK_OVERHEAD * self._body_bytes > MAX_HEAD_BYTES
            and self._phase is not ReceivePhase.RECEIVED
        ):
            self._refuse(431, f"a request's head is limited to {MAX_HEAD_BYTES} bytes")
        elif self._phase is ReceivePhase.RECEIVED and (self.cycle is None or self.cycle.response_complete):
            self._mark_idle()  # empty lines between requests must not keep a connection open for ever

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._phase, self._since = ReceivePhase.RECEIVING, self.loop.time()
        self._received = self._body_bytes = 0
        self._lingers_since = 0.0

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()
        if self._is_stopping:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._phase = ReceivePhase.RECEIVED
        self._in_head = True

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled_at = self.loop.time()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stalled_at = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        super()._start_asgi_task(cycle, _OneWrite(cycle, app).run)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def check(self, now: float) -> None:
        """Close the connection if its client is too slow."""
        if self._stalled_at is not None and now - self._stalled_at > self._connections.write_timeout_seconds:
            client = self.transport.get_extra_info("socket")
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)  # discards the kernel's buffer
            self.transport.abort()
        elif self._phase is ReceivePhase.RECEIVED or self.transport.is_closing():
            return
        elif self.flow.read_paused:
            self._since = now  # this side has stopped reading
        elif self._body_bytes and self.cycle.response_complete:  # answered before its end
            self._lingers_since = self._lingers_since or now
            if now - self._lingers_since > _LINGER_SECONDS:
                self.transport.close()
        elif now - self._since > self._connections.read_timeout_seconds + self._received / MIN_BYTES_PER_SECOND:
            if self._phase is ReceivePhase.IDLE:
                self.transport.close()
            else:
                self._refuse(408, "the request did not arrive within the proxy's read_timeout_seconds", retry=True)

    def _mark_idle(self) -> None:
        self._phase, self._since = ReceivePhase.IDLE, self.loop.time()
        self._received = self._body_bytes = 0

    def _refuse(self, status: int, message: str, *, retry: bool = False) -> None:
        """Close the connection, with an error response unless another response is in progress."""
        responding = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if not responding and not self.pipeline:
            body = openai_error(message, "server_error" if status >= 500 else "invalid_request_error")
            head = [f"HTTP/1.1 {status} {_REASONS[status]}", "content-type: application/json", "connection: close"]
            head += [f"content-length: {len(body)}", *(["retry-after: 1"] if retry else [])]
            self.transport.write("\r\n".join(head).encode() + b"\r\n\r\n" + body)
        self.transport.close()


class _OneWrite:
    """Wraps the application for one request: a head with a content length waits for the body; both are one write."""

    __slots__ = ("_app", "_cycle", "_start")

    def __init__(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:
        self._cycle = cycle
        self._app = app
        self._start: Message | None = None

    def run(self, scope: Any, receive: Any, _: Any) -> Awaitable[None]:
        """Run the application; uvicorn calls this."""
        scope[CLIENT_LEFT] = self._has_left
        return self._app(scope, receive, self._send)

    def _has_left(self) -> bool:
        return self._cycle.disconnected

    async def _send(self, message: Message) -> None:
        start, self._start = self._start, None
        if start is not None:
            head = None if self._cycle.flow.write_paused else _head(self._cycle, start, message)
            if head is not None:
                self._write(head, message.get("body", b""))
                return
            await self._cycle.send(start)  # type: ignore[arg-type]
        elif message["type"] == "http.response.start" and _length(message) is not None:
            self._start = message
            return
        if self._cycle.disconnected and message["type"] == "http.response.body" and not message.get("more_body"):
            raise ClientDisconnected
        await self._cycle.send(message)  # type: ignore[arg-type]

    def _write(self, head: bytes, body: bytes) -> None:
        """Write a complete response; then do what uvicorn's `send` does at its end."""
        cycle = self._cycle
        if cycle.disconnected:
            raise ClientDisconnected
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        cycle.transport.writelines((head, body))
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()


def _length(start: Message) -> bytes | None:
    """Return the content length if it is the last header, as `asgi.send_bytes` sends it."""
    headers = start.get("headers")
    return headers[-1][1] if headers and headers[-1][0] == b"content-length" else None


def _head(cycle: RequestResponseCycle, start: Message, message: Message) -> bytes | None:
    """Return the head of a response that this message completes; None if uvicorn must send it."""
    complete = not message.get("more_body") and _length(start) == b"%d" % len(message.get("body", b""))
    if not complete or cycle.scope["method"] == "HEAD":
        return None
    lines = [b"%b: %b\r\n" % header for header in (*cycle.default_headers, *start["headers"])]
    if not cycle.keep_alive:
        lines.append(b"connection: close\r\n")
    head = b"".join([STATUS_LINE[start["status"]], *lines, b"\r\n"])
    ends = len(lines) + 2
    return (
        head if head.count(b"\n") == head.count(b"\r") == ends else None
    )  # a header with a line break could inject another
