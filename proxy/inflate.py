"""Compressed request bodies: some clients send gzip or deflate, vLLM reads neither.

What is behind this layer sees the plain body. Inflating stops at the body limit, so that a small body cannot become
a large one; an encoding that cannot be read is told by its name.
"""

from __future__ import annotations

import zlib

from starlette.types import ASGIApp, Receive, Scope, Send

from proxy.asgi import BY_NAME, header, read_body, replaying
from proxy.errors import BadRequest, BodyTooLarge, UnknownEncoding
from proxy.threads import parsed

_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS
_KNOWN = ("gzip", "x-gzip", "deflate")


class Inflate:
    """The layer; a request without `content-encoding` passes through untouched."""

    def __init__(self, app: ASGIApp, body_limit: int) -> None:
        self._app = app
        self._body_limit = body_limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        encoding = header(scope, b"content-encoding")
        if encoding is None or encoding.lower() == "identity":
            await self._app(scope, receive, send)
            return
        if encoding.lower() not in _KNOWN:
            raise UnknownEncoding(
                f"the body's content-encoding {encoding[:40]!r} cannot be read here: send it as gzip, or uncompressed"
            )
        packed = await read_body(receive, self._body_limit)
        body = await parsed(inflated, packed, self._body_limit)
        headers = [(name, value) for name, value in scope["headers"] if name != b"content-encoding"]
        await self._app({**scope, "headers": headers, BY_NAME: None}, replaying(body, receive), send)


def inflated(packed: bytes, limit: int) -> bytes:
    """Return the body uncompressed. Raises BadRequest where it is broken, BodyTooLarge above `limit` bytes."""
    reader = zlib.decompressobj(_GZIP_OR_ZLIB)
    try:
        body = reader.decompress(packed, limit + 1)
    except zlib.error as error:
        raise BadRequest(f"the compressed body cannot be read: {error}") from error
    if len(body) > limit:
        raise BodyTooLarge(f"the body is larger than {limit} bytes once uncompressed (the proxy's setting body_limit)")
    if not reader.eof:
        raise BadRequest("the compressed body ends too early")
    return body
