"""Real servers: a scripted vLLM, a store and a proxy; the clients are the `openai` package."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.types import ASGIApp

from ratchet.proxy.app import create_app
from ratchet.proxy.settings import ProxySettings
from ratchet.proxy.upstreams.vllm_client import Upstream
from ratchet.store.access.replica_list import ReplicaList
from ratchet.store.store import Store, open_store
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import eventually, served


@pytest.fixture(scope="session")
def scripted() -> Iterator[tuple[ScriptedVllm, str]]:
    """One scripted vLLM for all tests, and its URL."""
    app = ScriptedVllm()
    with served(app) as url:
        yield app, url


@pytest.fixture
def vllm(scripted: tuple[ScriptedVllm, str]) -> ScriptedVllm:
    """The scripted vLLM, reset."""
    scripted[0].restart()
    return scripted[0]


@pytest.fixture
def vllm_url(scripted: tuple[ScriptedVllm, str], vllm: ScriptedVllm) -> str:
    """The URL of the scripted vLLM."""
    return scripted[1]


@pytest.fixture
def store(store_file: Path) -> Iterator[Store]:
    """A fresh SQLite store."""
    opened = open_store(str(store_file))
    yield opened
    opened.close()


class Proxy:
    """A running proxy with an HTTP client and agents' clients."""

    def __init__(self, url: str, store: Store) -> None:
        self.url = url
        self.store = store
        self.http = httpx.Client(base_url=url, timeout=20)
        self.clients: list[openai.OpenAI] = []

    def agent(self, key: str = "k", path: str = "/v1", **options: Any) -> openai.OpenAI:
        """An agent's client."""
        client = openai.OpenAI(base_url=self.url + path, api_key=key, **{"max_retries": 0, "timeout": 20.0, **options})
        self.clients.append(client)
        return client

    def settled(self) -> None:
        """Wait until all records are in the store."""
        eventually(lambda: self.http.get("/health/backlog").json()["unshipped_records"] == 0)

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
    limits = (chosen.stream_idle_timeout_seconds, chosen.max_upstream_response_bytes)
    urls = ReplicaList(chosen.upstreams).resolve()
    upstream = Upstream(urls, chosen.request_timeout_seconds, chosen.connect_timeout_seconds, None, *limits)
    with served(around(create_app(chosen, store, upstream, "http://test"))) as url:
        proxy = Proxy(url, store)
        try:
            if ready:
                eventually(lambda: proxy.http.get("/health/ready").status_code == 200)
            yield proxy
        finally:
            proxy.close()


Start = Callable[..., Proxy]


@pytest.fixture
def start(vllm_url: str, store: Store, tmp_path: Path) -> Iterator[Start]:
    """Start a proxy with settings; all stop with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda **settings: stack.enter_context(running(vllm_url, store, tmp_path, **settings))


@pytest.fixture
def proxy(start: Start) -> Proxy:
    """A proxy with default settings, ready."""
    return start()
