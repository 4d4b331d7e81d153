"""The two layers around every route, in pure ASGI: who is asking, and how errors are told."""

from __future__ import annotations

import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from proxy.asgi import JSON, KEY_ID, Headers, header, send_bytes
from proxy.errors import ClientLeft, ProxyError, WrongKey
from proxy.settings import hash_key
from proxy.shapes import shape_of

log = logging.getLogger("ratchet.proxy")

_OPEN_PATHS = ("/health/", "/metrics")  # a probe or a scraper has no key


class Errors:
    """Turns our errors into answers in the shape that the path's clients read; nothing else passes through here."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except ClientLeft:
            log.info("event=client_left path=%s", scope["path"])
        except ProxyError as error:
            if started:
                raise
            headers: Headers = [JSON]
            if error.retry_after is not None:
                headers.append((b"retry-after", b"%d" % error.retry_after))
            await send_bytes(send, error.status, shape_of(scope["path"]).ours(error), headers)
        except Exception:  # the outermost door: a defect of ours is told in the shape that clients read
            if started:
                raise
            log.exception("event=defect path=%s", scope["path"])
            defect = ProxyError("the proxy failed; its log says why")
            await send_bytes(send, 500, shape_of(scope["path"]).ours(defect), [JSON])


class Keys:
    """Refuses unknown API keys and puts the known one's id into the scope. Keys are never kept, only hashes."""

    def __init__(self, app: ASGIApp, hashes: frozenset[str]) -> None:
        self._app = app
        self._hashes = hashes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = header(scope, b"authorization") or ""
        key = given[7:].strip() if given[:7].lower() == "bearer " else header(scope, b"x-api-key")
        hashed = hash_key(key.encode()) if key else None
        if self._hashes and hashed not in self._hashes and not scope["path"].startswith(_OPEN_PATHS):
            raise WrongKey("the API key is missing or not known here: send it as `Authorization: Bearer KEY`")
        scope[KEY_ID] = hashed[:16] if hashed else None
        await self._app(scope, receive, send)
