"""Real servers: a scripted vLLM, a store and a proxy; the clients are the `openai` package."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from ratchet.store.store import Store
from tests.harness.proxy.raw_upstream import RawUpstream, raw_upstream
from tests.harness.proxy.running_proxy import Proxy, Start, running
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import served


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


@pytest.fixture(scope="module")
def upstream() -> Iterator[RawUpstream]:
    """An upstream that answers with any bytes."""
    with raw_upstream() as server:
        yield server


@pytest.fixture
def start(vllm_url: str, store: Store, tmp_path: Path) -> Iterator[Start]:
    """Start a proxy with settings; all stop with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda **settings: stack.enter_context(running(vllm_url, store, tmp_path, **settings))


@pytest.fixture
def proxy(start: Start) -> Proxy:
    """A proxy with default settings, ready."""
    return start()
