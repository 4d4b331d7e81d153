"""Requests as bytes on a socket: complete ones, those that no HTTP library writes, and those that never end.

Replies are read by the standard library, one connection per request. A connection closed without a reply has status 0.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from tests.harness.hostile.bodies import HostileRequest

CLOSED = 0


@dataclass(frozen=True)
class RawReply:
    """A reply."""

    status: int
    text: bytes  # headers and body


def send_request(url: str, request: HostileRequest, timeout: float = 20.0) -> RawReply:
    """Send a request; return its reply."""
    headers = dict(request.headers)
    lines = [f"{request.method} {request.path} HTTP/1.1"]
    lines += [] if "host" in headers else [f"host: {urlsplit(url).netloc}"]
    lines += [f"{name}: {value}" for name, value in request.headers]
    lines += ["connection: close", f"content-length: {len(request.body)}", "", ""]
    return send(url, "\r\n".join(lines).encode("latin-1", "replace") + request.body, timeout)


def send(url: str, request: bytes, timeout: float = 20.0, *, half_close: bool = False) -> RawReply:
    """Send bytes; return the first reply."""
    parts = urlsplit(url)
    with socket.create_connection((str(parts.hostname), parts.port or 80), timeout) as line:
        with contextlib.suppress(OSError):
            line.sendall(request)
            if half_close:
                line.shutdown(socket.SHUT_WR)
        return read(line, "HEAD" if request.startswith(b"HEAD ") else None)


def read(line: socket.socket, method: str | None = None) -> RawReply:
    """Read one reply from a connection."""
    reply = http.client.HTTPResponse(line, method=method)
    try:
        reply.begin()
        return RawReply(reply.status, str(reply.headers).encode("latin-1", "replace") + reply.read())
    except (http.client.HTTPException, OSError) as error:
        return RawReply(CLOSED, repr(error).encode())
    finally:
        reply.close()


def malformed(key: str) -> list[bytes]:
    """Return requests that no HTTP library writes."""
    auth = f"authorization: Bearer {key}\r\n".encode()
    start, body = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n" + auth, b'{"model":"agent"}'
    return [
        b"\r\n\r\n",
        b"\x00" * 100,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 60,  # a TLS handshake
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /v1/models HTTP/1.0\r\n" + auth + b"\r\n",
        b"GET /v1/models\r\n\r\n",
        b"GET /v1/mod els HTTP/1.1\r\nhost: x\r\n\r\n",
        b"G\x00T /v1/models HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /v1/models HTTP/1.1\nhost: x\n" + auth.replace(b"\r", b"") + b"\n",
        b"GET /\xff\xfe HTTP/1.1\r\nhost: x\r\n" + auth + b"\r\n",
        b"GET /v1/models HTTP/1.1\r\n" + auth + b"\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\nhost: y\r\n" + auth + b"\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost : x\r\n" + auth + b"\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\n folded: y\r\n" + auth + b"\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\na\x00b: y\r\n" + auth + b"\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx: \x00\r\n" + auth + b"\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 5000 + auth + b"\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 200_000 + b"\r\n\r\n",
        b"GET /v1/models?" + b"y" * 200_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET " + b"/" * 65_000 + b" HTTP/1.1\r\nhost: x\r\n" + auth + b"\r\n",
        start + b"content-length: -1\r\n\r\n" + body,
        start + b"content-length: 9" + b"9" * 40 + b"\r\n\r\n" + body,
        start + b"content-length: 0x11\r\n\r\n" + body,
        start + b"content-length: 17\r\ncontent-length: 18\r\n\r\n" + body,
        start + b"content-length: 5\r\n\r\n" + body,
        start + b"content-length: 17\r\ntransfer-encoding: chunked\r\n\r\n" + body,
        start + b"transfer-encoding: chunked, identity\r\n\r\n" + body,
        start + b"transfer-encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
        start + b"transfer-encoding: chunked\r\n\r\nZZ\r\n" + body + b"\r\n0\r\n\r\n",
        start + b"transfer-encoding: chunked\r\n\r\n-1\r\n" + body,
        start + b"transfer-encoding: chunked\r\n\r\nffffffffffffffff1\r\n" + body,
        start + b"transfer-encoding: chunked\r\n\r\n11;" + b"x" * 100_000 + b"\r\n" + body + b"\r\n0\r\n\r\n",
        start + b"transfer-encoding: chunked\r\n\r\n11\r\n" + body + b"\r\n0\r\nauthorization: x\r\n\r\n",
        start + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\n{\r\n" * 20_000 + b"0\r\n\r\n",
        start + b"expect: 100-continue\r\ncontent-length: 17\r\n\r\n" + body,
        start + b"upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-key: x\r\n\r\n",
        start + b"upgrade: h2c\r\nconnection: upgrade, http2-settings\r\nhttp2-settings: x\r\n\r\n",
        b"CONNECT 127.0.0.1:1 HTTP/1.1\r\nhost: x\r\n" + auth + b"\r\n",
        b"OPTIONS * HTTP/1.1\r\nhost: x\r\n" + auth + b"\r\n",
        b"GET http://169.254.169.254/ HTTP/1.1\r\nhost: x\r\n" + auth + b"\r\n",
        (b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + auth + b"\r\n") * 200,  # pipelined
    ]


def slow(key: str) -> list[tuple[bytes, bytes]]:
    """Return (prefix, bytes repeated one by one) of requests that never end."""
    start = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n".encode()
    return [
        (b"", b""),
        (b"G", b"ET /"),
        (start, b"x: y\r\n"),
        (start + b"content-length: 1000\r\n\r\n", b"{"),
        (start + b"content-length: 1000\r\n\r\n{", b""),
        (start + b"transfer-encoding: chunked\r\n\r\n", b"1\r\n{\r\n"),
        (b"\r\n", b"\r\n"),
    ]


class SlowSenders:
    """Connections whose requests never end, open until the proxy closes them."""

    def __init__(self, url: str, key: str, times: int) -> None:
        self.left_open = 0
        self.replies: list[RawReply] = []
        self._threads = [
            threading.Thread(target=self._send_slowly, args=(url, first, rest)) for first, rest in slow(key) * times
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait for all connections."""
        for thread in self._threads:
            thread.join()

    def _send_slowly(self, url: str, first: bytes, rest: bytes, timeout: float = 30.0) -> None:
        parts, until = urlsplit(url), time.monotonic() + timeout
        with socket.create_connection((str(parts.hostname), parts.port or 80), timeout) as line:
            line.settimeout(0.2)
            with contextlib.suppress(ConnectionError):
                line.sendall(first)
                received, at = b"", 0
                while time.monotonic() < until:
                    with contextlib.suppress(TimeoutError):
                        piece = line.recv(65536)
                        received += piece
                        if not piece:
                            self.replies.append(RawReply(int(received[9:12]) if received else CLOSED, received))
                            return
                    line.sendall(rest[at : at + 1])
                    at = (at + 1) % len(rest) if rest else 0
                self.left_open += 1
                return
            self.replies.append(RawReply(CLOSED, b""))
