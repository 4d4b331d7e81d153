"""Routes a request to its endpoint, and starts and stops the proxy's services (ASGI's lifespan).

The prefixes `/t/{trajectory}`, those of Azure OpenAI (`/openai`, `/openai/deployments/{deployment}`) and `/v1` are
removed first; the scope has trajectory and deployment under `asgi.TRAJECTORY` and `asgi.DEPLOYMENT`, and the remaining
path under `asgi.PATH`. An endpoint is an ASGI application.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from ratchet.proxy.errors import NotFound, ProxyError, method_not_allowed
from ratchet.proxy.wire.asgi import DEPLOYMENT, PATH, TRAJECTORY, unknown_route_error

log = logging.getLogger("ratchet.proxy")

_AZURE = "/openai"
_DEPLOYMENT = re.compile(r"/openai/deployments/(.+?)(/(?:chat/)?completions)/*")
_REPEATED_PREFIX = re.compile(r"^(/+v1)*/+")


class Router:
    """Mounted applications by prefix, then exact routes, then all other paths under /v1."""

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
        scope[DEPLOYMENT], path = _split_deployment(path)
        versioned = path.startswith("/v1/")
        scope[PATH] = path = path[3:] if versioned else path
        endpoint = self._routes.get((scope["method"], path)) or self._find_leniently(scope, path.rstrip("/"), versioned)
        await endpoint(scope, receive, send)

    def _find_leniently(self, scope: Scope, path: str, versioned: bool) -> ASGIApp:
        """Return the endpoint of a path with trailing slashes; HEAD is GET, whose body the server drops.

        Also accepts a repeated prefix: from a base URL that ends with a slash, or with the /v1 that clients append.
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
    """The endpoint for methods that a route does not support: names those that it does; answers OPTIONS."""

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
    return name, "/" + rest


def _split_deployment(path: str) -> tuple[str | None, str]:
    """Return the deployment that a path of Azure OpenAI names, and the path in OpenAI's form."""
    if not path.startswith(f"{_AZURE}/"):
        return None, path
    found = _DEPLOYMENT.fullmatch(path)
    return (found[1], found[2]) if found else (None, path.removeprefix(_AZURE))


class LifespanService(Protocol):
    """A component that runs as long as the server."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


class Lifespan:
    """Starts services in order with the server, and stops them in reverse order."""

    def __init__(self, app: ASGIApp, services: Sequence[LifespanService], on_stop: Callable[[], None]) -> None:
        self._app = app
        self._services = services
        self.on_stop = on_stop  # called when the server begins to stop
        self.failure: ProxyError | None = None  # why the services did not start

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        running: list[LifespanService] = []
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

    async def _stop(self, running: list[LifespanService]) -> None:
        for service in reversed(running):
            await service.stop()
