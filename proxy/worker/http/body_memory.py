"""Limits the bytes of request bodies in memory, in total and per key. Above a limit a request is refused for now.

A body counts from its arrival until its call has ended: it is sent to vLLM, possibly more than once. A compressed body
counts with its uncompressed size. A request without a body costs one look at its headers.
"""

from __future__ import annotations

from collections import Counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ratchet.proxy.errors import BodyTooLarge, NotReady, RateLimited
from ratchet.proxy.wire.asgi import KEY_ID, headers_of, read_body, replay_body
from ratchet.store.ids import owner

BODY = "ratchet.body"  # scope key of the BodyReservation of a request with a body

_COUNTED_AHEAD = 64 * 1024  # bytes; of a larger body only what has arrived counts


class BodyReservation:
    """The bytes that one request holds."""

    __slots__ = ("_key", "_memory", "_size")

    def __init__(self, memory: BodyMemory, key: str) -> None:
        self._memory = memory
        self._key = key
        self._size = 0

    def reserve(self, size: int) -> None:
        """Reserve `size` more bytes. Raises RateLimited, NotReady."""
        self._memory.reserve(self._key, size)
        self._size += size

    def release(self) -> None:
        """Release all bytes."""
        self._memory.release(self._key, self._size)
        self._size = 0


class BodyMemory:
    """The middleware."""

    def __init__(self, app: ASGIApp, max_bytes: int, max_bytes_per_key: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_bytes_per_key = max_bytes_per_key
        self._by_key: Counter[str] = Counter()
        self.bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = headers_of(scope)
        length = headers.get(b"content-length", b"0")
        if length == b"0" and b"transfer-encoding" not in headers:
            await self._app(scope, receive, send)
            return
        reservation = scope[BODY] = BodyReservation(self, owner(scope[KEY_ID]))
        known = int(length) if length.isdigit() else 0
        try:
            if 0 < known <= _COUNTED_AHEAD:
                reservation.reserve(known)
                await self._app(scope, receive, send)
            else:
                await self._app(scope, _counting(receive, reservation), send)
        finally:
            reservation.release()

    def reserve(self, key: str, size: int) -> None:
        """Reserve `size` more bytes for a key. Raises RateLimited, NotReady."""
        if self._by_key[key] + size > self._max_bytes_per_key:
            raise RateLimited(
                f"the key's open requests hold {self._by_key[key]} bytes, this one adds {size}, and at most "
                f"{self._max_bytes_per_key} are allowed (half of the proxy's setting max_inflight_request_bytes): "
                "retry when others have ended",
                code="too_many_bytes",
            )
        if self.bytes + size > self._max_bytes:
            raise NotReady(
                f"the open requests hold {self.bytes} bytes, this one adds {size}, and at most {self._max_bytes} are "
                "allowed (the proxy's setting max_inflight_request_bytes): retry when others have ended",
                code="too_many_bytes",
            )
        self._by_key[key] += size
        self.bytes += size

    def release(self, key: str, size: int) -> None:
        """Release `size` bytes of a key."""
        self.bytes -= size
        self._by_key[key] -= size
        if not self._by_key[key]:
            del self._by_key[key]


def _counting(receive: Receive, reservation: BodyReservation) -> Receive:
    async def counting_receive() -> Message:
        message = await receive()
        if message["type"] == "http.request":
            reservation.reserve(len(message.get("body", b"")))
        return message

    return counting_receive


class BodyLimit:
    """Middleware for an application that reads bodies itself. `name` names the application in the error."""

    def __init__(self, app: ASGIApp, limit: int, name: str) -> None:
        self._app = app
        self._limit = limit
        self._name = name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(receive, self._limit)
        except BodyTooLarge as error:
            raise BodyTooLarge(f"a request body to {self._name} may have at most {self._limit} bytes") from error
        await self._app(scope, replay_body(body, receive), send)
