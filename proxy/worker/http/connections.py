"""What one connection may cost: uvicorn's HTTP protocol with bounds on its head, its pace and its number.

Promises: a request's head, and whatever else is not body, takes at most `MAX_HEAD_BYTES` bytes (431); a request has to
come
at a pace of `MIN_BYTES_PER_SECOND` bytes a second after `read_timeout_seconds` (408); a client that does not read its
answer holds it for
`write_timeout_seconds` at most, in a buffer of uvicorn's size, and then counts as having left; above `most`
connections a new
one is told 503 and closed. A refusal on this level closes the connection. The cost per request is a few comparisons:
one task looks at the open connections every second, there is no timer per request. An answer of known length goes out
in one write, head and body. An answer whose client has left is not taken for sent: its last message raises
ClientDisconnected.

Does not bound bodies (`asgi.read_body`) or how long an answer takes (`request_timeout_seconds`).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Awaitable
from enum import Enum
from functools import partial
from typing import Any

from starlette.types import ASGIApp, Message
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from ratchet.proxy.errors import ClientDisconnected, openai_error
from ratchet.proxy.wire.asgi import CLIENT_LEFT

log = logging.getLogger("ratchet.proxy")

MAX_HEAD_BYTES = 64 * 1024  # bytes
MIN_BYTES_PER_SECOND = 10_000  # bytes a second

_CHUNK_COST = 8  # bytes of framing that a byte of a chunked body may take
_LINGER = 5.0  # seconds for the rest of a body that was answered before its end
_EVERY = 1.0
_NO_LINGER = struct.pack("ii", 1, 0)

_REASONS = {
    408: "Request Timeout",
    400: "Bad Request",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


_OFFER = b"\nupgrade:"
_HEAD_ENDS = b"\n\r\n"


def _without_upgrade(data: bytes) -> tuple[bytes, bytes]:
    """Return bytes of a request's head with the offer of another protocol, which RFC 9110 lets a server ignore, unread.

    The parser would take the body for the other protocol. Java's HTTP client and `curl --http2` offer h2c with every
    request. The header, however it is spelled, keeps its length under another name. The second value is what cannot be
    read yet: the last bytes, where they may be the beginning of such a header, or of the head's end.
    """
    end = data.find(_HEAD_ENDS, 0, MAX_HEAD_BYTES)
    head = data[: end + 1 if end >= 0 else MAX_HEAD_BYTES].lower()
    place = head.find(_OFFER)
    while place >= 0:
        data = data[: place + 1] + b"offered" + data[place + 8 :]
        place = head.find(_OFFER, place + 8)
    if end < 0 and (last := head.rfind(b"\n")) >= 0 and len(head) == len(data):
        rest = head[last:]
        if _OFFER.startswith(rest) or _HEAD_ENDS.startswith(rest):
            return data[:last], data[last:]
    return data, b""


class _Phase(Enum):
    WAITING = 0  # for the first byte of a request
    COMING = 1  # some of a request is here
    WHOLE = 2  # the request is here; its answer is made, or was sent


class ClientConnections:
    """The connections of one server, and their bounds."""

    def __init__(self, most: int, read_timeout_seconds: float, write_timeout_seconds: float) -> None:
        self.most = most
        self.read_timeout_seconds = read_timeout_seconds
        self.write_timeout_seconds = write_timeout_seconds
        self._open: set[ClientConnection] = set()

    @property
    def protocol(self) -> Any:
        """What uvicorn makes connections with."""
        return partial(ClientConnection, self)

    def enter(self, connection: ClientConnection) -> bool:
        """Count a connection in; False where there are too many."""
        if len(self._open) >= self.most:
            return False
        self._open.add(connection)
        return True

    def leave(self, connection: ClientConnection) -> None:
        """Count a connection out."""
        self._open.discard(connection)

    async def watch(self) -> None:
        """End the connections that are too slow, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(_EVERY, self.read_timeout_seconds / 4, self.write_timeout_seconds / 4))
            now = loop.time()
            for connection in list(self._open):
                self._check(connection, now)

    def _check(self, connection: ClientConnection, now: float) -> None:
        """Look at one connection; one that cannot be looked at is ended, and the watch goes on."""
        try:
            connection.check(now)
        except Exception:
            log.exception("event=connection_not_checked")
            self._open.discard(connection)
            connection.transport.abort()


class ClientConnection(HttpToolsProtocol):
    """One connection. Times are the loop's."""

    def __init__(
        self,
        doors: ClientConnections,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        **more: Any,
    ) -> None:
        super().__init__(config, server_state, app_state, **more)
        self._doors = doors
        self._phase = _Phase.WAITING
        self._since = self.loop.time()
        self._stalled_at: float | None = None
        self._lingers_since = 0.0
        self._in_head = True  # or before it
        self._held = b""  # bytes of the head that cannot be read yet
        self._got = 0  # bytes of this request
        self._body = 0  # those of its body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._doors.enter(self):
            self._refuse(503, f"this proxy has its max_connections ({self._doors.most}) open; try again", again=True)

    def connection_lost(self, exc: Exception | None) -> None:
        self._doors.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._got += len(data)
        if self._in_head:
            data, self._held = _without_upgrade(self._held + data)
        super().data_received(data)
        if self._got - _CHUNK_COST * self._body > MAX_HEAD_BYTES and self._phase is not _Phase.WHOLE:
            self._refuse(431, f"a request's head is limited to {MAX_HEAD_BYTES} bytes")
        elif self._phase is _Phase.WHOLE and (self.cycle is None or self.cycle.response_complete):
            self._wait()  # empty lines between requests must not keep a connection open for ever

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._phase, self._since = _Phase.COMING, self.loop.time()
        self._got = self._body = 0
        self._lingers_since = 0.0

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._phase = _Phase.WHOLE
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
        """End the connection where its client is too slow."""
        if self._stalled_at is not None and now - self._stalled_at > self._doors.write_timeout_seconds:
            line = self.transport.get_extra_info("socket")
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)  # the kernel's buffer goes with it
            self.transport.abort()
        elif self._phase is _Phase.WHOLE or self.transport.is_closing():
            return
        elif self.flow.read_paused:
            self._since = now  # it is we who do not read
        elif self._body and self.cycle.response_complete:  # it was answered before its end
            self._lingers_since = self._lingers_since or now
            if now - self._lingers_since > _LINGER:
                self.transport.close()
        elif now - self._since > self._doors.read_timeout_seconds + self._got / MIN_BYTES_PER_SECOND:
            if self._phase is _Phase.WAITING:
                self.transport.close()
            else:
                self._refuse(408, "the request did not come within the proxy's read_timeout_seconds", again=True)

    def _wait(self) -> None:
        self._phase, self._since = _Phase.WAITING, self.loop.time()
        self._got = self._body = 0

    def _refuse(self, status: int, message: str, *, again: bool = False) -> None:
        """Answer in OpenAI's shape, where no other answer is under way, and close."""
        under_way = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if not under_way and not self.pipeline:
            body = openai_error(message, "server_error" if status >= 500 else "invalid_request_error")
            head = [f"HTTP/1.1 {status} {_REASONS[status]}", "content-type: application/json", "connection: close"]
            head += [f"content-length: {len(body)}", *(["retry-after: 1"] if again else [])]
            self.transport.write("\r\n".join(head).encode() + b"\r\n\r\n" + body)
        self.transport.close()


class _OneWrite:
    """The application, for one request: a head that tells the body's length waits for it, and both are one write."""

    __slots__ = ("_app", "_cycle", "_start")

    def __init__(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:
        self._cycle = cycle
        self._app = app
        self._start: Message | None = None

    def run(self, scope: Any, receive: Any, _: Any) -> Awaitable[None]:
        """What uvicorn calls."""
        scope[CLIENT_LEFT] = self._gone
        return self._app(scope, receive, self._send)

    def _gone(self) -> bool:
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
        """Send a whole answer; what follows it is as in uvicorn's `send`."""
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
    """Return the length of the body, where a head tells it last, as `asgi.send_bytes` does."""
    headers = start.get("headers")
    return headers[-1][1] if headers and headers[-1][0] == b"content-length" else None


def _head(cycle: RequestResponseCycle, start: Message, message: Message) -> bytes | None:
    """Return the head of an answer that is whole with this message; None where uvicorn has to see to it."""
    whole = not message.get("more_body") and _length(start) == b"%d" % len(message.get("body", b""))
    if not whole or cycle.scope["method"] == "HEAD":
        return None
    lines = [b"%b: %b\r\n" % header for header in (*cycle.default_headers, *start["headers"])]
    if not cycle.keep_alive:
        lines.append(b"connection: close\r\n")
    head = b"".join([STATUS_LINE[start["status"]], *lines, b"\r\n"])
    ends = len(lines) + 2
    return head if head.count(b"\n") == head.count(b"\r") == ends else None  # no header may become two
