"""A vLLM with another base model than the versions' is detected, reported and gets no calls."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from ratchet.proxy.coordinator.versions.base_model_check import BaseModelCheck
from ratchet.proxy.errors import UpstreamError
from ratchet.proxy.upstreams.circuit_breaker import CircuitBreaker
from ratchet.proxy.upstreams.replica_pool import Replica
from ratchet.proxy.upstreams.vllm_client import Upstream
from ratchet.store.store import Store
from tests.harness.ports import free_port
from tests.harness.proxy.running_proxy import Proxy, running
from tests.harness.proxy.scripted_base import ScriptedBaseModel
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import eventually, served

QUICK: dict[str, Any] = {"probe_interval_seconds": 0.05, "breaker_reset_seconds": 0.05}


def other() -> ScriptedVllm:
    """A vLLM that serves another model of the same shape under the same name."""
    app = ScriptedVllm()
    app.model = ScriptedBaseModel(root="/models/other", weights=1)
    return app


@contextmanager
def started(store: Store, folder: Path, *urls: str) -> Iterator[Proxy]:
    with running(urls[0], store, folder, upstreams=urls, **QUICK) as proxy:
        eventually(lambda: (known := store.base_models.base_model_of("agent")) and known.server_fingerprint)
        yield proxy


def alarms(store: Store) -> dict[str, str]:
    return {alarm.name: alarm.reason for alarm in store.alarms.active()}


def not_ready(proxy: Proxy) -> httpx.Response | None:
    """Return the readiness answer if it reports another base model. The probe after the comparison sees it."""
    ready = proxy.http.get("/health/ready")
    return ready if ready.status_code != 200 and "base model" in ready.text else None


def probe_results(proxy: Proxy) -> list[bool]:
    """Return for each replica whether its last probe succeeded."""
    return [one["up"] for one in proxy.http.get("/health/ready").json()["upstreams"]]


def test_a_vllm_restarted_with_another_base_makes_the_proxy_unready_until_the_right_one_is_back(
    store: Store, tmp_path: Path
) -> None:
    port = free_port()
    with ExitStack() as first, ExitStack() as stack:
        url = first.enter_context(served(ScriptedVllm(), port))
        proxy = stack.enter_context(started(store, tmp_path, url))
        assert proxy.http.get("/health/ready").status_code == 200
        first.close()
        with served(other(), port):
            eventually(lambda: "base_model:agent" in alarms(store))
            ready = eventually(lambda: not_ready(proxy))
            assert ready.status_code == 503
            (reason,) = ready.json()["missing"]
            assert reason == alarms(store)["base_model:agent"]
            assert "/models/other" in reason
            assert "nats on average" in reason
        with served(ScriptedVllm(), port):
            eventually(lambda: proxy.http.get("/health/ready").status_code == 200)
            eventually(lambda: "base_model:agent" not in alarms(store))


@pytest.mark.slow
def test_a_proxy_that_starts_with_another_base_than_the_versions_reports_it(store: Store, tmp_path: Path) -> None:
    with served(ScriptedVllm()) as url, started(store, tmp_path / "a", url):
        pass
    with served(other()) as url, running(url, store, tmp_path / "b", ready=False, **QUICK) as proxy:
        eventually(lambda: "which is not the base model" in proxy.http.get("/health/ready").text)


def test_another_number_type_or_machine_is_not_another_base_model(store: Store, tmp_path: Path) -> None:
    port = free_port()
    with ExitStack() as first, ExitStack() as stack:
        url = first.enter_context(served(ScriptedVllm(), port))
        proxy = stack.enter_context(started(store, tmp_path, url))
        first.close()
        app = ScriptedVllm()
        app.model = ScriptedBaseModel(root="/elsewhere", noise=0.04)
        with served(app, port):
            eventually(lambda: app.model.comparisons)
            eventually(lambda: proxy.http.get("/health/ready").status_code == 200)
            assert alarms(store) == {}


def test_a_replica_of_another_base_gets_no_calls_while_a_right_one_is_up(store: Store, tmp_path: Path) -> None:
    right, wrong = ScriptedVllm(), other()
    with served(right) as first, served(wrong) as second:
        with started(store, tmp_path / "a", first):
            pass
        with running(first, store, tmp_path / "b", upstreams=(first, second), **QUICK) as proxy:
            eventually(lambda: "base_model:agent" in alarms(store))
            eventually(lambda: probe_results(proxy) == [True, False])
            assert proxy.http.get("/health/ready").status_code == 200
            for number in range(10):
                body = {"model": "agent", "messages": [{"role": "user", "content": f"{number}"}]}
                assert proxy.http.post("/v1/chat/completions", json=body).status_code == 200
            assert (len(right.calls), len(wrong.calls)) == (10, 0)


async def refused(check: BaseModelCheck, replica: Replica) -> bool:
    """Whether a check reports that a replica serves another base model."""
    try:
        await check.look(replica)
    except UpstreamError as error:
        return "not the base model" in str(error)
    return False


async def test_a_replica_without_a_sign_of_change_is_compared_again_after_a_while(store: Store) -> None:
    store.policies.register_base("agent", "tiny-base")
    app = ScriptedVllm()
    with served(app) as url:
        upstream, replica = Upstream((url,)), Replica(url, CircuitBreaker(3, 1.0))
        check = BaseModelCheck(lambda: ("agent",), store, upstream, lambda one: upstream.models(one.url), every=0.05)
        await check.start()
        await check.look(replica)
        while not app.model.comparisons:
            await asyncio.sleep(0.01)
        app.model.weights = 1
        while not await refused(check, replica):
            await asyncio.sleep(0.02)
        await check.stop()
        await upstream.stop()


async def test_a_healthy_replica_is_not_compared_at_every_probe(store: Store) -> None:
    store.policies.register_base("agent", "tiny-base")
    app = ScriptedVllm()
    with served(app) as url:
        upstream, replica = Upstream((url,)), Replica(url, CircuitBreaker(3, 1.0))
        check = BaseModelCheck(lambda: ("agent",), store, upstream, lambda one: upstream.models(one.url))
        await check.start()
        for _ in range(30):
            await check.look(replica)
            await asyncio.sleep(0.01)
        assert app.model.comparisons == 1
        await check.stop()
        await upstream.stop()
