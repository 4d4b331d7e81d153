"""The one module that meets the HTTP client: vLLM's replicas, and how their failures are told.

Promises: a foreign error never leaves this module; leaving an answer before its end closes the connection at
once, which is how vLLM learns that nobody waits any more. Does not read what is in an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec
from yarl import URL

from proxy.errors import UpstreamBroke, UpstreamError, UpstreamTimeout, UpstreamUnreachable

_KEEP_ALIVE = 4.0  # vLLM closes idle connections after 5 s; ours must be the shorter time
_JSON = {"content-type": "application/json"}


class HttpAnswer:
    """An upstream's answer whose body may still be coming."""

    def __init__(self, url: str, response: aiohttp.ClientResponse) -> None:
        self.url = url
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers
        self._response = response
        self._first: bytes | None = None
        self._closed: Callable[[], None] | None = None

    def on_close(self, closed: Callable[[], None]) -> None:
        """Call `closed` once, when the answer is let go."""
        self._closed = closed

    async def begin(self) -> None:
        """Wait for the body's first piece, which `pieces` yields again. Raises UpstreamError; it is closed then."""
        try:
            self._first = await self._response.content.readany()
        except (aiohttp.ClientError, TimeoutError) as error:
            self.close()
            raise _translated(self.url, error) from error
        except asyncio.CancelledError:
            self.close()
            raise

    async def read(self) -> bytes:
        """Return the whole body. Raises UpstreamError."""
        try:
            return await self._response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _translated(self.url, error) from error

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes, unbuffered. Raises UpstreamError where it breaks off."""
        if self._first:
            yield self._first
            self._first = None
        try:
            async for piece in self._response.content.iter_any():
                yield piece
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _translated(self.url, error) from error

    def close(self) -> None:
        """Let go: a finished connection is used again, an unfinished one is closed at once."""
        self._response.close() if not self._response.content.at_eof() else self._response.release()
        closed, self._closed = self._closed, None
        if closed is not None:
            closed()


class Upstream:
    """The replicas of one vLLM service."""

    def __init__(
        self,
        urls: Sequence[str],
        request_timeout: float = 600.0,
        connect_timeout: float = 5.0,
        key: str | None = None,
    ) -> None:
        self.urls = tuple(urls)
        self._timeout = aiohttp.ClientTimeout(total=request_timeout, sock_connect=connect_timeout)
        self._key = {"authorization": f"Bearer {key}"} if key else {}
        self._session: aiohttp.ClientSession | None = None
        self._loading: dict[tuple[str, str], asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Open the connection pool."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=self._timeout,
            headers=self._key,
            skip_auto_headers=("user-agent",),
        )

    async def stop(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()

    async def send(
        self, url: str, method: str, path: str, body: bytes | None, headers: Mapping[str, str] | None = None
    ) -> HttpAnswer:
        """Send one request and return the answer at its headers. Raises UpstreamError. Close the answer.

        The path goes out as it is: nothing in it is decoded, and no dots are resolved.
        """
        assert self._session is not None, "start() comes first"
        for attempt in (1, 2):
            try:
                response = await self._session.request(
                    method, URL(url + path, encoded=True), data=body, headers=headers, allow_redirects=False
                )
                return HttpAnswer(url, response)
            except aiohttp.ServerDisconnectedError as error:
                # The replica closed a kept connection while the request was under way to it: nothing was served.
                if attempt == 2:
                    raise _translated(url, error) from error
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise _translated(url, error) from error
        raise AssertionError("unreachable")

    async def post_json(self, url: str, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> HttpAnswer:
        """Send a JSON body by POST. Raises UpstreamError. Close the answer."""
        return await self.send(url, "POST", path, body, {**_JSON, **headers} if headers else _JSON)

    async def models(self, url: str) -> list[dict[str, Any]]:
        """Return the replica's model cards. Raises UpstreamError."""
        answer = await self.send(url, "GET", "/v1/models", None)
        try:
            body = await answer.read()
        finally:
            answer.close()
        try:
            cards = msgspec.json.decode(body, type=dict[str, Any])["data"]
            return [card for card in cards if isinstance(card, dict)]
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            raise UpstreamBroke(f"upstream {url} answered /v1/models with {answer.status}, not a model list") from error

    async def load_adapter(self, url: str, name: str, path: str) -> None:
        """Load an adapter at one replica; callers at the same time share one load. Raises UpstreamError."""
        key = (url, name)
        if key not in self._loading:
            task = asyncio.get_running_loop().create_task(self._load(url, name, path))
            self._loading[key] = task
            task.add_done_callback(lambda _: self._loading.pop(key, None))
        await asyncio.shield(self._loading[key])  # a caller that leaves must not stop the load of the others

    async def _load(self, url: str, name: str, path: str) -> None:
        body = msgspec.json.encode({"lora_name": name, "lora_path": path})
        answer = await self.post_json(url, "/v1/load_lora_adapter", body)
        try:
            text = (await answer.read()).decode("utf-8", "replace")
        finally:
            answer.close()
        if answer.status != 200 and "already" not in text:
            raise UpstreamError(f"upstream {url} cannot load adapter {name} from {path}: {answer.status} {text[:500]}")


def _translated(url: str, error: BaseException) -> UpstreamError:
    reason = str(error) or type(error).__name__
    if isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)):
        return UpstreamUnreachable(f"upstream {url} cannot be reached: {reason}; is vLLM running there?")
    if isinstance(error, TimeoutError):
        return UpstreamTimeout(f"upstream {url} did not answer in time (the proxy's setting request_timeout)")
    return UpstreamBroke(f"upstream {url} broke off: {reason}")
