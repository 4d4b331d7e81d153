"""The outermost layer, in pure ASGI: how errors are told."""

from __future__ import annotations

import logging
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ratchet.proxy.errors import ClientDisconnected, ProxyError
from ratchet.proxy.wire.asgi import JSON, Headers, headers_of, send_bytes
from ratchet.proxy.wire.error_shapes import error_shape_of
from ratchet.proxy.worker.http import request_identity
from ratchet.store.ids import new_id

log = logging.getLogger("ratchet.proxy")


class ErrorMiddleware:
    """Turns our errors into answers in the shape that the path's clients read; nothing else passes through here."""

    def __init__(self, app: ASGIApp, count: Callable[[ProxyError | None], None]) -> None:
        self._app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except ClientDisconnected:
            log.info("event=client_disconnected path=%r", scope["path"])
        except ProxyError as error:
            self._count(error)
            if started:
                raise
            await _tell(scope, send, error)
        except Exception:  # the outermost door: a defect of ours is told in the shape that clients read
            self._count(None)
            if started:
                raise
            log.exception("event=defect path=%r", scope["path"])
            await _tell(scope, send, ProxyError("the proxy failed; its log says why"))


async def _tell(scope: Scope, send: Send, error: ProxyError) -> None:
    """Answer with an error, under an id by which a client can name it."""
    name = request_identity.request_id(headers_of(scope), new_id("req"))
    headers: Headers = [JSON, (b"x-request-id", name), (b"request-id", name), *error.headers]
    if error.retry_after is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after))
    await send_bytes(send, error.status, error_shape_of(scope).encode_error(error), headers)
