"""Authenticates requests by API key and puts the caller into the scope.

Without configured keys, every program on this machine has access, but no web page: a browser that reached the proxy
under a foreign host name, or from a page of another origin, is refused. Exceptions are the proxy's own pages and, on
the agents' routes, the origins of this machine in `allowed_origins`. With keys, the operator API needs its own key.

A key may have a trajectory id as suffix: `KEY:ID` is KEY, and the call belongs to ID. This serves agents that can be
configured with an API key each and nothing else. If no keys are needed, only a key that begins with `rk-` is split:
any other may be another service's secret that contains a colon.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from urllib.parse import urlsplit

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from ratchet.proxy.api_keys import KEYS_VARIABLE, OPERATOR_KEYS_VARIABLE, PREFIX, hash_key, is_loopback
from ratchet.proxy.coordinator.keys.key_cache import ANONYMOUS, Caller, KeyCache
from ratchet.proxy.coordinator.limits.rate_limits import with_rate_limits
from ratchet.proxy.errors import BadRequest, Forbidden, InvalidApiKey
from ratchet.proxy.runtime.thread_pools import REQUESTER, Requester
from ratchet.proxy.wire.asgi import CALLER, CLIENT_LEFT, KEY_ID, header, headers_of
from ratchet.store.ids import UNCHECKED

_OPEN_PATHS = ("/health", "/ping", "/metrics", "/ui")  # probes and scrapers have no key; the pages contain no data
_FRONT = "/"  # redirects to the pages
_CROSS_SITE = (b"cross-site", b"same-site")  # `sec-fetch-site` of a page of another origin
_OPERATOR_PATH = "/api"
_FEEDBACK_ROUTE = ("POST", "/api/feedback")  # open to agents' keys too: it only writes


class Authentication:
    """The middleware. Only hashes of keys are kept in memory."""

    def __init__(self, app: ASGIApp, key_cache: KeyCache, allowed_origins: Collection[str]) -> None:
        self._app = app
        self._key_cache = key_cache
        self._pages = frozenset(origin for origin in allowed_origins if _is_ours(origin))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        caller = ANONYMOUS
        if not path.startswith(_OPEN_PATHS) and path != _FRONT:
            needed = self._key_cache.key_needed
            if not needed:
                _check_web_origin(scope, self._pages)
            key = _key_of(scope)
            if key.startswith(PREFIX) and (needed or self._key_cache.has_operators):
                await self._refresh_keys_for(key)
            if self._is_operator_request(scope, path, key):
                if not self._key_cache.operator_key_needed and not _is_own(scope):
                    raise _other_page(scope)
                self._check_operator(key)
                caller = self._key_cache.operator_of(_hash(key))
            else:
                caller = self._agent_of(key) if needed else self._anonymous(key)
        scope[CALLER] = caller
        scope[KEY_ID] = caller.key_id
        REQUESTER.set(Requester(caller.key_id, scope.get(CLIENT_LEFT)))
        if caller.meter is None:
            await self._app(scope, receive, send)
        else:
            await with_rate_limits(self._app, caller.meter, scope, receive, send)

    async def _refresh_keys_for(self, key: str) -> None:
        """Refresh the key cache for an unknown key: it may have been created a moment ago."""
        if not self._key_cache.is_known_key(_hash(key)) and not self._key_cache.is_known_key(
            _hash(key.partition(":")[0])
        ):
            await self._key_cache.refresh_keys()

    def _is_operator_request(self, scope: Scope, path: str, key: str) -> bool:
        """Return whether a request needs operator access."""
        if (scope["method"], path) == _FEEDBACK_ROUTE:  # feedback from another page is not the operator's
            return self._key_cache.is_operator_key(_hash(key)) or (
                not self._key_cache.operator_key_needed and _is_own(scope)
            )
        return path == _OPERATOR_PATH or path.startswith(_OPERATOR_PATH + "/")

    def _agent_of(self, key: str) -> Caller:
        """Return the caller of a key, with the trajectory of its suffix. Raises InvalidApiKey, Forbidden."""
        if caller := self._key_cache.caller_of(_hash(key)):
            return caller
        bare, colon, trajectory = key.partition(":")
        if colon and (caller := self._key_cache.caller_of(_hash(bare))):
            return msgspec.structs.replace(caller, trajectory=trajectory or None)
        if self._key_cache.is_operator_key(_hash(key)):
            raise Forbidden(
                f"an operator's key only opens {_OPERATOR_PATH}: send an agent's key (`ratchet keys create`, or "
                f"{KEYS_VARIABLE})"
            )
        raise _unknown_key()

    def _anonymous(self, key: str) -> Caller:
        """Return the caller of a request that needs no key; a key only separates agents from each other."""
        if not key:
            return self._key_cache.anyone
        bare, _, trajectory = key.partition(":") if key.startswith(PREFIX) else (key, "", "")
        return msgspec.structs.replace(
            self._key_cache.anyone, key_id=UNCHECKED + _hash(bare)[:16], trajectory=trajectory or None
        )

    def _check_operator(self, key: str) -> None:
        hashed = _hash(key)
        if self._key_cache.is_operator_key(hashed) or not self._key_cache.operator_key_needed:
            return
        if self._key_cache.caller_of(hashed) is None:
            raise _unknown_key()
        remedy = f"send an operator's key (`ratchet keys create --scope operator`, or {OPERATOR_KEYS_VARIABLE}"
        raise Forbidden(
            f"an agent's key does not open {_OPERATOR_PATH}: {remedy}"
            + (")" if self._key_cache.has_operators else ", which is not set; set it where the proxy is started)")
        )


def _hash(key: str) -> str:
    return hash_key(key.encode("latin-1"))  # restores the bytes that were sent


def _key_of(scope: Scope) -> str:
    """Return the request's key; empty if it has none."""
    given = header(scope, b"authorization") or ""
    if given[:7].lower() == "bearer ":
        return given[7:].strip()
    return header(scope, b"x-api-key") or header(scope, b"api-key") or ""


def _unknown_key() -> InvalidApiKey:
    return InvalidApiKey("the API key is missing or unknown: send it as `Authorization: Bearer KEY`")


def _check_web_origin(scope: Scope, allowed: Collection[str]) -> None:
    """Raise Forbidden for a browser under a foreign host name (DNS rebinding) or on a page of another origin.

    Pages of this machine in `allowed` are accepted.
    """
    host = header(scope, b"host")
    if host is None:
        raise BadRequest(
            "the request has no Host header: HTTP/1.1 requires it, and without API keys the proxy checks it",
            param="host",
        )
    if not _is_ours(f"//{host}"):
        raise Forbidden(
            f"without API keys the proxy only answers under a name of this machine, not {host!r}: set {KEYS_VARIABLE} "
            "and send a key, or call the proxy as 127.0.0.1 or localhost"
        )
    if not _is_own(scope) and header(scope, b"origin") not in allowed:
        raise Forbidden(
            f"without API keys the proxy does not answer web pages of other origins, such as {_page(scope)}: set "
            f"{KEYS_VARIABLE} and send a key, or name a page of this machine in the proxy's setting allowed_origins"
        )


def _is_own(scope: Scope) -> bool:
    """Return whether a request is from no web page, or from one of the proxy: browsers send one of two headers."""
    headers = headers_of(scope)
    origin = headers.get(b"origin")
    if not origin:
        return headers.get(b"sec-fetch-site") not in _CROSS_SITE
    return origin.partition(b"://")[2] == headers.get(b"host")


def _other_page(scope: Scope) -> Forbidden:
    return Forbidden(
        f"{_OPERATOR_PATH} only answers the proxy's own pages, not those of {_page(scope)}: set "
        f"{OPERATOR_KEYS_VARIABLE} and send a key"
    )


def _page(scope: Scope) -> str:
    origin = header(scope, b"origin")
    return "another site" if origin is None else repr(origin)


@lru_cache(maxsize=256)
def _is_ours(url: str) -> bool:
    try:
        return is_loopback(urlsplit(url).hostname or "")
    except ValueError:
        return False
