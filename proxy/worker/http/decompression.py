"""Decompresses request bodies: some clients send gzip, deflate or zstd, vLLM accepts none of them.

Decompression stops at the body limit, so a small body cannot become a huge one, and at a number of parts: an empty part
of 20 bytes costs as much as a thousand bytes. An unsupported encoding is refused.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Mapping
from typing import Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from ratchet.proxy.errors import BadRequest, BodyTooLarge
from ratchet.proxy.runtime.thread_pools import run_parsing
from ratchet.proxy.wire.asgi import HEADERS_BY_NAME, header, read_body, replay_body
from ratchet.proxy.worker.http.body_memory import BODY

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_STEP = 16 * 1024
_MAX_PARTS = 4096  # gzip members or zstd frames; tools that write several write one for 64 KB or more
_MAX_WINDOW: Mapping[int, int] = {zstd.DecompressionParameter.window_log_max: 23}  # 8 MB of memory: RFC 9659


class _Reader(Protocol):
    """Decompresses one gzip member or zstd frame."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


def _zlib_reader() -> _Reader:
    return zlib.decompressobj(32 + zlib.MAX_WBITS)  # gzip or zlib


def _zstd_reader() -> _Reader:
    return zstd.ZstdDecompressor(options=_MAX_WINDOW)


# How a part is read, and how another one begins; anything else after a gzip member is padding.
_ENCODINGS: dict[str, tuple[Callable[[], _Reader], bytes]] = {
    "gzip": (_zlib_reader, b"\x1f\x8b"),
    "x-gzip": (_zlib_reader, b"\x1f\x8b"),
    "deflate": (_zlib_reader, b"\x1f\x8b"),
    "zstd": (_zstd_reader, b""),
}


class Decompression:
    """The middleware; a request without `content-encoding` passes unchanged."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        encoding = (header(scope, b"content-encoding") or "identity").lower()
        if encoding == "identity":
            await self._app(scope, receive, send)
            return
        if encoding not in _ENCODINGS:
            raise BadRequest(
                f"the body's content-encoding {encoding[:40]!r} is not supported: send the body as gzip or zstd, or "
                f"uncompressed",
                code="unsupported_content_encoding",
                status=415,
            )
        packed = await read_body(receive, self._max_body_bytes)
        body = await run_parsing(decompressed_body, packed, self._max_body_bytes, encoding)
        if reservation := scope.get(BODY):
            reservation.reserve(len(body))
        headers = [(name, value) for name, value in scope["headers"] if name != b"content-encoding"]
        await self._app({**scope, "headers": headers, HEADERS_BY_NAME: None}, replay_body(body, receive), send)


def decompressed_body(packed: bytes, limit: int, encoding: str = "gzip") -> bytes:
    """Return the uncompressed body, all of its parts. Raises BadRequest, or BodyTooLarge above `limit` bytes."""
    make_reader, begin = _ENCODINGS[encoding]
    parts: list[bytes] = []
    at = size = 0
    while len(parts) < _MAX_PARTS:
        at, part = _read_part(make_reader(), packed, at, limit - size)
        parts.append(part)
        size += len(part)
        if at == len(packed) or not packed.startswith(begin, at):
            return b"".join(parts)
    raise BadRequest(f"the compressed body has more than {_MAX_PARTS} parts: compress it as one")


def _read_part(reader: _Reader, packed: bytes, at: int, max_bytes: int) -> tuple[int, bytes]:
    """Return the end of the part that begins at `at`, and its content. Raises BadRequest, BodyTooLarge."""
    parts: list[bytes] = []
    while not reader.eof:
        piece = packed[at : at + _STEP]  # small: the unused rest is copied, and there may be a part every few bytes
        try:
            part = reader.decompress(piece, max_bytes + 1)
        except (zlib.error, zstd.ZstdError) as error:
            raise BadRequest(f"the compressed body cannot be read: {error}") from error
        max_bytes -= len(part)
        if max_bytes < 0:
            raise BodyTooLarge("the body is larger than the proxy's setting max_body_bytes once it is uncompressed")
        parts.append(part)
        at += len(piece) - len(reader.unused_data)
        if not piece and not reader.eof:
            raise BadRequest("the compressed body ends too early")
    return at, b"".join(parts)
