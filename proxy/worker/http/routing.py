"""From a path to an endpoint: one dictionary, with the prefixes `/t/{trajectory}` and `/v1` taken off first.

An endpoint is an ASGI application. What the prefix said is in the scope under `asgi.TRAJECTORY`, the bare path
under `asgi.PATH`. Also here: the start and stop of services with the server (ASGI's lifespan).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol
from urllib.parse import unquote

from starlette.types import ASGIApp, Receive, Scope, Send

from ratchet.proxy.errors import NotFound, ProxyError, method_not_allowed
from ratchet.proxy.wire.asgi import PATH, TRAJECTORY, unknown_route_error

log = logging.getLogger("ratchet.proxy")

_REPEATED_PREFIX = re.compile(r"^(/+v1)*/+")


class Router:
    """Exact routes first, then mounted applications by prefix, then whatever else is under /v1."""

    def __init__(
        self,
        routes: Mapping[tuple[str, str], ASGIApp],
        models: ASGIApp,
        responses: ASGIApp,
        mounts: Mapping[str, ASGIApp],
        rest: ASGIApp,
    ) -> None:
        self._routes = routes
        self._models = models
        self._responses = responses
        self._mounts = mounts
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise NotFound(f"{scope['type']} is not served here")
        path: str = scope["path"]
        for prefix, mounted in self._mounts.items():
            if path == prefix or path.startswith(prefix + "/"):
                method = "GET" if scope["method"] == "HEAD" else scope["method"]
                await mounted({**scope, "root_path": prefix, "method": method}, receive, send)
                return
        scope[TRAJECTORY], path = split_trajectory(path)
        versioned = path.startswith("/v1/")
        scope[PATH] = path = path[3:] if versioned else path
        endpoint = self._routes.get((scope["method"], path)) or self._lenient(scope, path.rstrip("/"), versioned)
        await endpoint(scope, receive, send)

    def _lenient(self, scope: Scope, path: str, versioned: bool) -> ASGIApp:
        """Return the endpoint of a path without its last slashes; HEAD is GET, whose body the server drops.

        So is one that a base URL has spoilt which ends with a slash, or with the /v1 that the client adds by itself.
        """
        bare = _REPEATED_PREFIX.sub("/", path)
        if bare != path and any(route == bare for _, route in self._routes):
            path = bare
        scope[PATH], method = path, "GET" if scope["method"] == "HEAD" else scope["method"]
        if found := self._routes.get((method, path)):
            return found
        allowed = sorted({known for known, route in self._routes if route == path})
        if allowed:
            return _OtherMethods([*allowed, "HEAD"] if "GET" in allowed else allowed)
        if path.startswith("/models/") and method == "GET":
            return self._models
        if path.startswith("/responses/resp_"):
            return self._responses
        if versioned and path:
            return self._rest
        raise unknown_route_error(scope)


class _OtherMethods:
    """The endpoint for the methods that a route does not take: says which it takes, to OPTIONS as an answer."""

    def __init__(self, allowed: Sequence[str]) -> None:
        self._allow = ", ".join([*allowed, "OPTIONS"])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "OPTIONS":
            raise method_not_allowed(f"{scope['path'][:200]} takes {self._allow}, not {scope['method']}", self._allow)
        await send({"type": "http.response.start", "status": 204, "headers": [(b"allow", self._allow.encode())]})
        await send({"type": "http.response.body", "body": b""})


def split_trajectory(path: str) -> tuple[str | None, str]:
    """Return (trajectory, rest) of `/t/{trajectory}/rest`; (None, path) for any other path."""
    if not path.startswith("/t/"):
        return None, path
    name, slash, rest = path[3:].partition("/")
    if not name or not slash:
        return None, path
    return unquote(name), "/" + rest


class Service(Protocol):
    """Something that runs as long as the server does."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


class Lifespan:
    """Starts services in order when the server starts, stops them in reverse order when it ends."""

    def __init__(self, app: ASGIApp, services: Sequence[Service], on_stop: Callable[[], None]) -> None:
        self._app = app
        self._services = services
        self.on_stop = on_stop  # to be called when the server is told to stop
        self.failure: ProxyError | None = None  # why the services did not start

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        running: list[Service] = []
        await receive()
        try:
            for service in self._services:
                await service.start()
                running.append(service)
        except ProxyError as error:
            self.failure = error
            await self._stop(running)
            log.error("event=start_failed reason=%r", str(error))
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._stop(running)
        await send({"type": "lifespan.shutdown.complete"})

    async def _stop(self, running: list[Service]) -> None:
        for service in reversed(running):
            await service.stop()
