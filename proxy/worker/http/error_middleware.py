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
                await _send_error(scope, send, stopped(), _request_id(scope))
        except ProxyError as error:
            self._count(error)
            name = _request_id(scope)
            if error.status in _REFUSED and scope["path"].startswith(_OPERATORS):
                log.warning(
                    "event=operator_refused status=%d client=%s path=%r request_id=%r",
                    error.status, client_address(scope), scope["path"][:200], name,
                )  # fmt: skip
            elif isinstance(error, UpstreamError):  # its response does not have the URL
                log.warning(
                    "event=upstream_failed path=%r reason=%r request_id=%r", scope["path"][:200], str(error), name
                )
            if started:
                raise
            await _send_error(scope, send, error, name)
        except Exception:  # the outermost layer: a bug is answered in the clients' format too
            self._count(None)
            if started:
                raise
            name = _request_id(scope)
            log.exception("event=internal_error path=%r request_id=%r", scope["path"], name)
            await _send_error(scope, send, ProxyError("the proxy failed; its log has the reason"), name)


def _request_id(scope: Scope) -> str:
    """Return the client's own request id, or a new one that the client can quote."""
    return request_identity.request_id(headers_of(scope), new_id("req")).decode()


async def _send_error(scope: Scope, send: Send, error: ProxyError, name: str) -> None:
    """Send an error response with a request id."""
    headers: Headers = [JSON, (b"x-request-id", name.encode()), (b"request-id", name.encode()), *error.headers]
    if error.retry_after is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after))
    await send_bytes(send, error.status, error_shape_of(scope).encode_error(error), headers)
