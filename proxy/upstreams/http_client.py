"""The HTTP client of the hot path: kept connections per upstream.

Promises: its errors are ours (`UpstreamUnreachable`, `UpstreamDisconnected`, `UpstreamTimeout`), with the remedy; a
request is sent again only where a kept connection was closed before anything was served. Paths go out as they are.
Follows no redirects, keeps no cookies, asks for no compression. Its own and no library's because of what a call costs
(benchmarks/RESULTS.md).
"""

from __future__ import annotations

import asyncio
import base64
import ssl
import time
from collections import deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import urlsplit

from ratchet.proxy.errors import UpstreamDisconnected, UpstreamError, UpstreamUnreachable
from ratchet.proxy.upstreams.http_connection import ConnectionDropped, HttpResponse, ResponseLimits, UpstreamConnection
from ratchet.store.access.url_credentials import credentials, without_credentials

_KEEP_ALIVE = 4.0  # seconds; vLLM closes idle connections after 5: ours must be the shorter time


class HttpClient:
    """Connections to any number of upstreams. Times are seconds.

    `secret`: by the URL that is shown, the same one with a user's name and password, for those that have one.
    """

    def __init__(
        self, limits: ResponseLimits, connect_timeout_seconds: float, secret: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._limits = limits
        self._connect_timeout = connect_timeout_seconds
        self._secret = secret
        self._origins: dict[str, _Origin] = {}

    async def send(
        self, url: str, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> HttpResponse:
        """Send one request to the upstream at `url` and return the answer at its headers. Raises UpstreamError."""
        origin = self._origins.get(url) or self._origin(url)
        head = origin.head(method, path, body, headers)
        connection = origin.kept() or await origin.connect()
        try:
            return await self._ask(connection, origin.url, method, head, body)
        except ConnectionDropped:
            try:
                return await self._ask(await origin.connect(), origin.url, method, head, body)
            except UpstreamError as error:
                error.may_have_begun = True  # a request that ends its server looks like a connection that was closed
                raise

    def _origin(self, url: str) -> _Origin:
        origin = self._origins[url] = _Origin(self._secret.get(url, url), self._connect_timeout)
        return origin

    async def _ask(
        self, connection: UpstreamConnection, url: str, method: str, head: bytes, body: bytes | None
    ) -> HttpResponse:
        answer = connection.ask(url, head, body or b"", self._limits, bodiless=method == "HEAD")
        await answer.head()
        return answer

    def close(self) -> None:
        """Close every connection."""
        for origin in self._origins.values():
            origin.close()


class _Target(NamedTuple):
    """What a URL says: where to connect, and what every request there begins with."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    prefix: str
    headers: str

    @classmethod
    def of(cls, url: str) -> _Target:
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        host = parts.hostname or ""
        headers = f"host: {parts.netloc.rpartition('@')[2]}\r\naccept-encoding: identity\r\n"
        if found := credentials(url):
            pair = ":".join(found)
            headers += f"authorization: Basic {base64.b64encode(pair.encode()).decode()}\r\n"
        port = parts.port or (443 if secure else 80)
        return cls(host, port, ssl.create_default_context() if secure else None, parts.path.rstrip("/"), headers)


class _Origin:
    """One upstream and its connections. The kept ones are used last in, first out, so that those in excess go.

    `url` may be shown; the one that it is made of may hold a password.
    """

    def __init__(self, url: str, connect_timeout_seconds: float) -> None:
        self.url = without_credentials(url)
        self._target = _Target.of(url)
        self._connect_timeout = connect_timeout_seconds
        self._kept: deque[UpstreamConnection] = deque()
        self._open: set[UpstreamConnection] = set()

    def head(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> bytes:
        """Return a request up to its body. Raises UpstreamDisconnected where a line would become two."""
        target = self._target
        lines = [f"{method} {target.prefix}{path} HTTP/1.1\r\n{target.headers}"]
        lines += [f"{name}: {value}\r\n" for name, value in headers.items()]
        if body is not None or method not in ("GET", "HEAD", "DELETE", "OPTIONS"):
            lines.append(f"content-length: {len(body or b'')}\r\n")
        lines.append("\r\n")
        head = "".join(lines)
        expected = len(lines) + target.headers.count("\n")
        if head.count("\n") != expected or head.count("\r") != expected or " " in path:
            raise UpstreamDisconnected(
                f"a request to upstream {self.url} has a line break or a space where none may be"
            )
        return head.encode("latin-1", "replace")

    def kept(self) -> UpstreamConnection | None:
        """Return a connection that is free, young enough, and open as far as is known."""
        now = time.monotonic()
        while self._kept:
            connection = self._kept.pop()
            if not connection.lost and now - connection.idle_since < _KEEP_ALIVE:
                return connection
            connection.abort()
        return None

    async def connect(self) -> UpstreamConnection:
        """Open a connection. Raises UpstreamUnreachable."""
        target = self._target
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: UpstreamConnection(self._free, self._gone), target.host, target.port, ssl=target.tls
                )
        except TimeoutError:
            raise self._unreachable(f"no connection within {self._connect_timeout:g} s") from None
        except (OSError, ValueError) as error:  # a wrong host name is a ValueError
            raise self._unreachable(str(error) or type(error).__name__) from error
        self._open.add(connection)
        return connection

    def close(self) -> None:
        """Close every connection."""
        for connection in list(self._open):
            connection.abort()

    def _free(self, connection: UpstreamConnection) -> None:
        connection.idle_since = time.monotonic()
        self._kept.append(connection)
        while connection.idle_since - self._kept[0].idle_since > _KEEP_ALIVE:
            self._kept.popleft().abort()

    def _gone(self, connection: UpstreamConnection) -> None:
        self._open.discard(connection)

    def _unreachable(self, reason: str) -> UpstreamUnreachable:
        return UpstreamUnreachable(f"upstream {self.url} cannot be reached: {reason}; is vLLM running there?")
