"""The outermost middleware: turns exceptions into error responses."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ratchet.proxy.errors import ClientDisconnected, ProxyError, UpstreamError, stopped
from ratchet.proxy.wire.asgi import JSON, Headers, client_address, headers_of, send_bytes
from ratchet.proxy.wire.error_shapes import error_shape_of
from ratchet.proxy.worker.http import request_identity
from ratchet.store.ids import new_id

log = logging.getLogger("ratchet.proxy")

_REFUSED = (401, 403)
_OPERATORS = "/api"


class ErrorMiddleware:
    """Answers with errors in the format of the path's clients. `count` gets each error, None for a bug."""

    def __init__(self, app: ASGIApp, count: Callable[[ProxyError | None], None]) -> None:
        self._app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except ClientDisconnected:
            log.info("event=client_disconnected path=%r", scope["path"])
        except asyncio.CancelledError:  # the server stops, and the time of open calls is over
            if started:
                raise
            with contextlib.suppress(ClientDisconnected):
                await _send_error(scope, send, stopped())
        except ProxyError as error:
            self._count(error)
            if error.status in _REFUSED and scope["path"].startswith(_OPERATORS):
                client, path = client_address(scope), scope["path"][:200]
                log.warning("event=operator_refused status=%d client=%s path=%r", error.status, client, path)
            elif isinstance(error, UpstreamError):  # its response does not have the URL
                log.warning("event=upstream_failed path=%r reason=%r", scope["path"][:200], str(error))
            if started:
                raise
            await _send_error(scope, send, error)
        except Exception:  # the outermost layer: a bug is answered in the clients' format too
            self._count(None)
            if started:
                raise
            log.exception("event=internal_error path=%r", scope["path"])
            await _send_error(scope, send, ProxyError("the proxy failed; its log has the reason"))


async def _send_error(scope: Scope, send: Send, error: ProxyError) -> None:
    """Send an error response with a request id that the client can quote."""
    name = request_identity.request_id(headers_of(scope), new_id("req"))
    headers: Headers = [JSON, (b"x-request-id", name), (b"request-id", name), *error.headers]
    if error.retry_after is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after))
    await send_bytes(send, error.status, error_shape_of(scope).encode_error(error), headers)
