"""Decompresses request bodies: some clients send gzip or deflate, vLLM accepts neither.

Decompression stops at the body limit, so a small body cannot become a huge one. An unsupported encoding is refused.
"""

from __future__ import annotations

import zlib

from starlette.types import ASGIApp, Receive, Scope, Send

from ratchet.proxy.errors import BadRequest, BodyTooLarge
from ratchet.proxy.runtime.thread_pools import run_parsing
from ratchet.proxy.wire.asgi import HEADERS_BY_NAME, header, read_body, replay_body
from ratchet.proxy.worker.http.body_memory import BODY

_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS
_GZIP = b"\x1f\x8b"
_STEP = 16 * 1024
_KNOWN = ("gzip", "x-gzip", "deflate")


class Decompression:
    """The middleware; a request without `content-encoding` passes unchanged."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        encoding = header(scope, b"content-encoding")
        if encoding is None or encoding.lower() == "identity":
            await self._app(scope, receive, send)
            return
        if encoding.lower() not in _KNOWN:
            raise BadRequest(
                f"the body's content-encoding {encoding[:40]!r} is not supported: send the body as gzip, or "
                f"uncompressed",
                code="unsupported_content_encoding",
                status=415,
            )
        packed = await read_body(receive, self._max_body_bytes)
        body = await run_parsing(decompressed_body, packed, self._max_body_bytes)
        if reservation := scope.get(BODY):
            reservation.reserve(len(body))
        headers = [(name, value) for name, value in scope["headers"] if name != b"content-encoding"]
        await self._app({**scope, "headers": headers, HEADERS_BY_NAME: None}, replay_body(body, receive), send)


def decompressed_body(packed: bytes, limit: int) -> bytes:
    """Return the uncompressed body, all of its gzip members. Raises BadRequest, or BodyTooLarge above `limit` bytes."""
    parts: list[bytes] = []
    at = size = 0
    while True:
        at, part = _member(packed, at, limit - size)
        parts.append(part)
        size += len(part)
        if not packed.startswith(_GZIP, at):  # padding, which gzip ignores
            return b"".join(parts)


def _member(packed: bytes, at: int, max_bytes: int) -> tuple[int, bytes]:
    """Return the end of the member that begins at `at`, and its content. Raises BadRequest, BodyTooLarge."""
    reader = zlib.decompressobj(_GZIP_OR_ZLIB)
    parts: list[bytes] = []
    while not reader.eof:
        piece = packed[at : at + _STEP]  # small: the unused rest is copied, and there may be a member every 20 bytes
        try:
            part = reader.decompress(piece, max_bytes + 1)
        except zlib.error as error:
            raise BadRequest(f"the compressed body cannot be read: {error}") from error
        max_bytes -= len(part)
        if max_bytes < 0:
            raise BodyTooLarge("the body is larger than the proxy's setting max_body_bytes once it is uncompressed")
        parts.append(part)
        at += len(piece) - len(reader.unused_data)
        if not piece and not reader.eof:
            raise BadRequest("the compressed body ends too early")
    return at, b"".join(parts)
