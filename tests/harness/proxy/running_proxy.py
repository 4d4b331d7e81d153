"""A proxy in a thread of this process, with an HTTP client and agents' clients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
from starlette.types import ASGIApp

from ratchet.proxy.app import create_app
from ratchet.proxy.settings import ProxySettings
from ratchet.proxy.upstreams.vllm_client import Upstream
from ratchet.store.access.replicas import ReplicaList
from ratchet.store.records import Call
from ratchet.store.store import Store
from tests.harness.proxy.servers import eventually, served


class Proxy:
    """A running proxy with an HTTP client and agents' clients."""

    def __init__(self, url: str, store: Store) -> None:
        self.url = url
        self.store = store
        self.http = httpx.Client(base_url=url, timeout=60)
        self.clients: list[openai.OpenAI] = []

    def agent(self, key: str = "k", path: str = "/v1", strict: bool = True, **options: Any) -> openai.OpenAI:
        """An agent's client. If `strict`, it fails at an answer that the SDK's types do not allow."""
        settings = {"max_retries": 0, "timeout": 20.0, "_strict_response_validation": strict, **options}
        client = openai.OpenAI(base_url=self.url + path, api_key=key, **settings)
        self.clients.append(client)
        return client

    def settled(self) -> None:
        """Wait until all records are in the store."""
        eventually(lambda: self.http.get("/health/backlog").json()["unshipped_records"] == 0)

    def last_call(self) -> Call:
        """The newest call, once all records are in the store."""
        self.settled()
        return self.store.calls.page(1)[0]

    def close(self) -> None:
        """Close the connections."""
        self.http.close()
        for client in self.clients:
            client.close()


@contextlib.contextmanager
def running(
    vllm_url: str,
    store: Store,
    folder: Path,
    ready: bool = True,
    around: Callable[[ASGIApp], ASGIApp] = lambda app: app,
    **settings: Any,
) -> Iterator[Proxy]:
    """A proxy in a thread of this process, with its journal in `folder`; `around` may watch it from outside."""
    values = {"upstreams": (vllm_url,), "model": "agent", "store": "-", "journal": folder / "journal"}
    chosen = ProxySettings(**(values | settings))
    urls = ReplicaList(chosen.upstreams).resolve()
    upstream = Upstream(urls, chosen.request_timeout_seconds, None, chosen.stream_idle_timeout_seconds)
    with served(around(create_app(chosen, store, upstream, "http://test"))) as url:
        proxy = Proxy(url, store)
        try:
            if ready:
                eventually(lambda: proxy.http.get("/health/ready").status_code == 200)
            yield proxy
        finally:
            proxy.close()


Start = Callable[..., Proxy]


def chat_body(words: str, **fields: Any) -> dict[str, Any]:
    """A chat request."""
    return {"model": "agent", "messages": [{"role": "user", "content": words}], **fields}
