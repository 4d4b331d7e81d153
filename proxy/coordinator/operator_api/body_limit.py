"""A layer before an application that reads bodies itself: what is larger than `limit` bytes never reaches it."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from ratchet.proxy.errors import BodyTooLarge
from ratchet.proxy.wire.asgi import read_body, replay_body


class BodyLimit:
    """The layer. Raises BodyTooLarge before more than `limit` bytes are held; `name` says of whom the limit is."""

    def __init__(self, app: ASGIApp, limit: int, name: str) -> None:
        self._app = app
        self._limit = limit
        self._name = name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(receive, self._limit)
        except BodyTooLarge as error:
            raise BodyTooLarge(f"a request body to {self._name} may have {self._limit} bytes at most") from error
        await self._app(scope, replay_body(body, receive), send)
