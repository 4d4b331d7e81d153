"""How many bytes of request bodies are held at once, in all and of each key: what is more is refused for the moment.

A body counts from its arrival until its call has ended, since it is sent on to vLLM, perhaps once more; one that was
compressed counts with what it inflates to. A request without a body costs one look at its headers.
"""

from __future__ import annotations

from collections import Counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ratchet.proxy.errors import NotReady, RateLimited
from ratchet.proxy.wire.asgi import KEY_ID, headers_of
from ratchet.store.access.ownership import owner

BODY = "ratchet.body"  # where the scope has the BodyReservation of a request that has a body

_COUNTED_BEFORE = 64 * 1024  # bytes; of larger ones only what has arrived counts


class BodyReservation:
    """The bytes that one request holds."""

    __slots__ = ("_bodies", "_held", "_key")

    def __init__(self, bodies: BodyMemory, key: str) -> None:
        self._bodies = bodies
        self._key = key
        self._held = 0

    def take(self, size: int) -> None:
        """Hold so many bytes more. Raises RateLimited, NotReady."""
        self._bodies.take(self._key, size)
        self._held += size

    def give_back(self) -> None:
        """Hold nothing any more."""
        self._bodies.give(self._key, self._held)
        self._held = 0


class BodyMemory:
    """The layer."""

    def __init__(self, app: ASGIApp, most: int, max_bytes_per_key: int) -> None:
        self._app = app
        self._most = most
        self._most_per_key = max_bytes_per_key
        self._by_key: Counter[str] = Counter()
        self.bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = headers_of(scope)
        length = headers.get(b"content-length", b"0")
        if length == b"0" and b"transfer-encoding" not in headers:
            await self._app(scope, receive, send)
            return
        held = scope[BODY] = BodyReservation(self, owner(scope[KEY_ID]))
        known = int(length) if length.isdigit() else 0
        try:
            if 0 < known <= _COUNTED_BEFORE:
                held.take(known)
                await self._app(scope, receive, send)
            else:
                await self._app(scope, _counting(receive, held), send)
        finally:
            held.give_back()

    def take(self, key: str, size: int) -> None:
        """Hold so many bytes more of a key's. Raises RateLimited, NotReady."""
        if self._by_key[key] + size > self._most_per_key:
            raise RateLimited(
                f"the key's requests under way hold {self._by_key[key]} bytes, this one adds {size}, and at most "
                f"{self._most_per_key} are taken (the proxy's setting max_inflight_request_bytes_per_key): try "
                "again when "
                "others have ended",
                code="too_many_bytes",
            )
        if self.bytes + size > self._most:
            raise NotReady(
                f"the requests under way hold {self.bytes} bytes, this one adds {size}, and at most {self._most} are "
                "taken (the proxy's setting max_inflight_request_bytes): try again when others have ended",
                code="too_many_bytes",
            )
        self._by_key[key] += size
        self.bytes += size

    def give(self, key: str, size: int) -> None:
        """Hold so many bytes of a key's no more."""
        self.bytes -= size
        self._by_key[key] -= size
        if not self._by_key[key]:
            del self._by_key[key]


def _counting(receive: Receive, held: BodyReservation) -> Receive:
    async def counted() -> Message:
        message = await receive()
        if message["type"] == "http.request":
            held.take(len(message.get("body", b"")))
        return message

    return counted
