"""The two layers around every route, in pure ASGI: who is asking, and how errors are told.

Without keys everyone on this machine may come in, but no web page: a browser that was led here by a name of
somebody else's, or by a page of another origin, is refused. With keys the operator API needs a key of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from proxy.asgi import JSON, KEY_ID, Headers, header, send_bytes
from proxy.errors import ClientLeft, Forbidden, ProxyError, WrongKey
from proxy.settings import KEYS_VARIABLE, OPERATOR_KEYS_VARIABLE, hash_key, is_loopback
from proxy.shapes import shape_of

log = logging.getLogger("ratchet.proxy")

_OPEN_PATHS = ("/health/", "/metrics")  # a probe or a scraper has no key
_OPERATOR_PATH = "/api"


class Errors:
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
        except ClientLeft:
            log.info("event=client_left path=%s", scope["path"])
        except ProxyError as error:
            self._count(error)
            if started:
                raise
            headers: Headers = [JSON]
            if error.retry_after is not None:
                headers.append((b"retry-after", b"%d" % error.retry_after))
            await send_bytes(send, error.status, shape_of(scope["path"]).ours(error), headers)
        except Exception:  # the outermost door: a defect of ours is told in the shape that clients read
            self._count(None)
            if started:
                raise
            log.exception("event=defect path=%s", scope["path"])
            defect = ProxyError("the proxy failed; its log says why")
            await send_bytes(send, 500, shape_of(scope["path"]).ours(defect), [JSON])


class Keys:
    """Refuses unknown API keys and puts the known one's id into the scope. Keys are never kept, only hashes."""

    def __init__(self, app: ASGIApp, hashes: frozenset[str], operator_hashes: frozenset[str]) -> None:
        self._app = app
        self._hashes = hashes
        self._operator_hashes = operator_hashes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = header(scope, b"authorization") or ""
        key = given[7:].strip() if given[:7].lower() == "bearer " else header(scope, b"x-api-key")
        hashed = hash_key(key.encode()) if key else None
        path: str = scope["path"]
        if not path.startswith(_OPEN_PATHS):
            if not self._hashes:
                _refuse_web_pages(scope)
            if path == _OPERATOR_PATH or path.startswith(_OPERATOR_PATH + "/"):
                self._check_operator(hashed)
            elif self._hashes and hashed not in self._hashes:
                raise _unknown_key()
        scope[KEY_ID] = hashed[:16] if hashed else None
        await self._app(scope, receive, send)

    def _check_operator(self, hashed: str | None) -> None:
        if hashed in self._operator_hashes or not (self._hashes or self._operator_hashes):
            return
        if hashed not in self._hashes:
            raise _unknown_key()
        raise Forbidden(
            f"an agent's key does not open {_OPERATOR_PATH}: send one of the keys in {OPERATOR_KEYS_VARIABLE}"
            + ("" if self._operator_hashes else ", which is not set; set it where the proxy is started")
        )


def _unknown_key() -> WrongKey:
    return WrongKey("the API key is missing or not known here: send it as `Authorization: Bearer KEY`")


def _refuse_web_pages(scope: Scope) -> None:
    """Raises Forbidden where a browser was led here: by a foreign name (DNS rebinding), or by a foreign page."""
    host, origin = header(scope, b"host"), header(scope, b"origin")
    remedy = f"set {KEYS_VARIABLE} and send a key, or call the proxy as 127.0.0.1 or localhost"
    if not _is_ours(f"//{host or ''}"):
        raise Forbidden(f"without API keys the proxy answers no other name than this machine's, not {host!r}: {remedy}")
    if origin is not None and not _is_ours(origin):
        raise Forbidden(f"without API keys the proxy answers no web page of another machine, not {origin!r}: {remedy}")


def _is_ours(url: str) -> bool:
    try:
        return is_loopback(urlsplit(url).hostname or "")
    except ValueError:
        return False
