"""vLLM's HTTP API as the proxy uses it: requests with the upstream's key, model lists, adapters.

Promises: failures are `UpstreamError`s. Closing a response before its end closes the connection at once, which stops
vLLM's generation. Does not parse responses to agents.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ratchet.proxy.errors import UpstreamDisconnected, UpstreamError
from ratchet.proxy.upstreams.http_client import HttpClient
from ratchet.proxy.upstreams.http_connection import HttpResponse, ResponseLimits
from ratchet.store.access.replicas import without_credentials

_JSON = {"content-type": "application/json"}
_CONNECT_TIMEOUT = 5.0  # seconds
_MAX_RESPONSE_BYTES = 256 * 2**20  # of a response that does not stream


class Upstream:
    """The replicas of one vLLM service; `urls` are without credentials."""

    def __init__(
        self,
        urls: Sequence[str],
        request_timeout_seconds: float = 600.0,
        key: str | None = None,
        stream_idle_timeout_seconds: float = 300.0,
    ) -> None:
        # Only the HTTP client sees the credentials in a URL.
        self.urls = tuple(map(without_credentials, urls))
        self._key = {"authorization": f"Bearer {key}"} if key else {}
        limits = ResponseLimits(
            request_timeout_seconds,
            min(stream_idle_timeout_seconds, request_timeout_seconds),
            _MAX_RESPONSE_BYTES,
        )
        self._credentials_urls = dict(zip(self.urls, urls, strict=True))
        self._client = HttpClient(limits, _CONNECT_TIMEOUT, self._credentials_urls)
        self._loading: dict[tuple[str, str], asyncio.Task[None]] = {}

    def replace(self, urls: Sequence[str]) -> None:
        """Use other replicas; running calls finish."""
        self.urls = tuple(map(without_credentials, urls))
        self._credentials_urls |= dict(zip(self.urls, urls, strict=True))

    async def start(self) -> None:
        """Nothing to start: connections are opened on demand."""

    async def stop(self) -> None:
        """Close every connection."""
        self._client.close()

    async def send(
        self, url: str, method: str, path: str, body: bytes | None, headers: Mapping[str, str] | None = None
    ) -> HttpResponse:
        """Send one request; return the response at its headers. Raises UpstreamError. Close the response.

        The path is sent unchanged: nothing in it is decoded, and no dots are resolved.
        """
        return await self._client.send(url, method, path, body, {**self._key, **headers} if headers else self._key)

    async def post_json(
        self, url: str, path: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> HttpResponse:
        """Send a JSON body by POST. Raises UpstreamError. Close the response."""
        return await self.send(url, "POST", path, body, {**_JSON, **headers} if headers else _JSON)

    async def models(self, url: str) -> list[dict[str, Any]]:
        """Return the replica's model cards. Raises UpstreamError."""
        response = await self.send(url, "GET", "/v1/models", None)
        try:
            body = await response.read()
        finally:
            response.close()
        try:
            cards = msgspec.json.decode(body, type=dict[str, Any])["data"]
            return [card for card in cards if isinstance(card, dict)]
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            raise UpstreamDisconnected(
                f"answered /v1/models with {response.status}, not a model list", url=url
            ) from error

    async def load_adapter(self, url: str, name: str, path: str) -> None:
        """Load an adapter on one replica; concurrent callers share one load. Raises UpstreamError."""
        key = (url, name)
        if key not in self._loading:
            task = asyncio.get_running_loop().create_task(self._load(url, name, path))
            self._loading[key] = task
            task.add_done_callback(lambda _: self._loading.pop(key, None))
        await asyncio.shield(self._loading[key])  # a caller that is cancelled must not stop the load

    async def _load(self, url: str, name: str, path: str) -> None:
        body = msgspec.json.encode({"lora_name": name, "lora_path": path})
        response = await self.post_json(url, "/v1/load_lora_adapter", body)
        try:
            text = (await response.read()).decode("utf-8", "replace")
        finally:
            response.close()
        if response.status != 200 and "already" not in text:
            raise UpstreamError(
                f"cannot load adapter {name}", url=url, detail=f"{path}: {response.status} {text[:500]}"
            )
