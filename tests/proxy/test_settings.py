"""Settings and keys: every refusal names the remedy."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from ratchet.proxy.api_keys import hash_key
from ratchet.proxy.coordinator.versions.base_model_check import BaseModelCheck
from ratchet.proxy.errors import ProxyError, UpstreamError
from ratchet.proxy.server import serve
from ratchet.proxy.settings import ProxySettings, secret_values, usable_cores, workers_for
from ratchet.proxy.upstreams.circuit_breaker import CircuitBreaker
from ratchet.proxy.upstreams.replica_pool import Replica
from ratchet.proxy.upstreams.vllm_client import Upstream
from ratchet.store.store import Store
from tests.harness.ports import free_port
from tests.harness.proxy.running_proxy import Proxy, Start, running
from tests.harness.proxy.scripted_base import ScriptedBaseModel
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import ROOT, eventually, served

VALUES: Any = {"upstreams": ("http://127.0.0.1:1",), "model": "agent", "store": "s.db", "journal": Path("j")}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": "a@1"}, "choose another name"),
        ({"upstreams": ("127.0.0.1:8000",)}, "write it like http://"),
        ({"upstreams": ()}, "upstreams"),
        ({"captur": "strict"}, "captur"),
        ({"capture": "maybe"}, "capture"),
        ({"workers": "many"}, "give a number of processes, or `auto`"),
        ({"max_journal_bytes": 2**16}, "raise max_journal_bytes"),
    ],
)
def test_an_invalid_setting_is_named_with_its_remedy(change: Any, says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        ProxySettings(**(VALUES | change))


@pytest.mark.parametrize(
    ("cpu_max", "cores"), [("250000 100000", 2), ("50000 100000", 1), ("max 100000", None), ("", None), (None, None)]
)
def test_usable_cores_are_those_of_the_affinity_and_of_the_containers_limit(
    cpu_max: str | None, cores: int | None, tmp_path: Path
) -> None:
    file = tmp_path / "cpu.max"
    if cpu_max is not None:
        file.write_text(cpu_max)
    allowed = len(os.sched_getaffinity(0))
    assert usable_cores(file) == (allowed if cores is None else min(allowed, cores))


def test_automatic_workers_leave_most_cores_to_the_other_services() -> None:
    assert [workers_for(cores) for cores in (1, 2, 8, 15, 16, 32, 64)] == [1, 1, 1, 1, 2, 4, 4]
    assert ProxySettings(**(VALUES | {"workers": "auto"})).workers == workers_for(usable_cores())
    assert ProxySettings(**(VALUES | {"workers": "3"})).workers == 3


def test_keys_come_from_the_environment_and_are_kept_as_hashes() -> None:
    settings = ProxySettings(**VALUES, host="0.0.0.0", **secret_values({"RATCHET_API_KEYS": "sesame, two"}, ()))
    assert settings.key_hashes == {hash_key(b"sesame"), hash_key(b"two")}
    assert "sesame" not in repr(settings)
    assert secret_values({"RATCHET_OPERATOR_KEYS": "boss"}, ())["operator_hashes"] == {hash_key(b"boss")}


def test_unknown_keys_get_401_and_known_ones_an_answer(start: Start) -> None:
    proxy = start(ready=False, key_hashes=frozenset({hash_key(b"good")}))
    assert proxy.http.get("/v1/models").json()["error"]["code"] == "invalid_api_key"
    assert proxy.http.get("/api/calls", headers={"authorization": "Bearer bad"}).status_code == 401
    assert proxy.http.get("/v1/models", headers={"authorization": "Bearer good"}).status_code == 200
    assert proxy.http.get("/v1/models", headers={"x-api-key": "good"}).status_code == 200
    assert proxy.http.get("/health/live").status_code == 200


def test_an_agents_key_is_refused_by_the_operator_api(start: Start, tmp_path: Path) -> None:
    agent, boss = {"authorization": "Bearer good"}, {"authorization": "Bearer boss"}
    keys = {"key_hashes": frozenset({hash_key(b"good")})}
    proxy = start(ready=False, **keys)
    refused = proxy.http.get("/api/calls", headers=agent)
    assert refused.status_code == 403
    assert "RATCHET_OPERATOR_KEYS, which is not set" in refused.json()["error"]["message"]
    assert proxy.http.get("/api", headers=agent).status_code == 403
    keys["operator_hashes"] = frozenset({hash_key(b"boss")})
    proxy = start(ready=False, journal=tmp_path / "journal-2", **keys)
    assert proxy.http.get("/api/calls", headers=agent).status_code == 403
    assert proxy.http.get("/api/calls").status_code == 401
    assert proxy.http.get("/api/calls", headers=boss).status_code == 200
    assert proxy.http.get("/v1/models", headers=boss).status_code == 403


@pytest.mark.slow
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "localhost:9"}, 200),
        ({"host": "127.0.0.1"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": "127.0.0.1.evil.example:8000"}, 403),
        ({"host": "[::1"}, 403),
        ({"host": "x@evil.example"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "http://127.0.0.1@evil.example"}, 403),
        ({"origin": "null"}, 403),
    ],
)
def test_without_keys_web_pages_of_other_origins_are_refused(
    proxy: Proxy, headers: dict[str, str], status: int
) -> None:
    for path in ("/v1/models", "/api/calls"):
        answer = proxy.http.get(path, headers=headers)
        assert answer.status_code == status
        assert status == 200 or "set RATCHET_API_KEYS" in answer.json()["error"]["message"]
    body: Any = b'{"model": "agent", "messages": [{"role": "user", "content": "hi"}]}'
    written = proxy.http.post("/v1/chat/completions", content=body, headers={**headers, "content-type": "text/plain"})
    assert written.status_code == status
    assert proxy.http.get("/health/live", headers=headers).status_code == 200


PAGES = [
    {"origin": "http://localhost:3000"},
    {"origin": "http://127.0.0.1:1"},
    {"origin": "http://[::1]:3000"},
    {"origin": "null"},
    {"sec-fetch-site": "same-site"},
    {"sec-fetch-site": "cross-site"},
    {"origin": "http://localhost:3000", "sec-fetch-site": "same-origin"},
]


@pytest.mark.parametrize("page", PAGES)
def test_without_keys_a_page_of_another_local_server_neither_acts_nor_reads(
    proxy: Proxy, vllm: ScriptedVllm, page: dict[str, str]
) -> None:
    call: Any = b'{"model": "agent", "messages": [{"role": "user", "content": "hi"}]}'
    run = proxy.http.post("/v1/chat/completions", content=call).headers["x-ratchet-trajectory"]
    proxy.settled()
    calls = len(vllm.calls)
    feedback = b'{"trajectory_id": "%s", "value": 1}' % run.encode()
    for kind in ("application/json", "text/plain"):  # a page may send the latter without a preflight
        headers = {**page, "content-type": kind}
        for path, body in (("/v1/chat/completions", call), ("/v1/embeddings", call), ("/api/feedback", feedback)):
            assert proxy.http.post(path, content=body, headers=headers).status_code == 403
    for method, path in OPERATED:
        assert proxy.http.request(method, path.format(run=run), headers=page).status_code == 403, (method, path)
    assert proxy.http.get("/v1/models", headers=page).status_code == 403
    assert (len(vllm.calls), proxy.store.feedback.page(9)) == (calls, [])
    assert proxy.store.trajectories.get(run).state == "open"


OPERATED = [
    ("GET", "/api/feedback"), ("HEAD", "/api/feedback"), ("PUT", "/api/feedback"), ("GET", "/api/calls"),
    ("GET", "/api/trajectories/{run}"), ("GET", "/api/openapi.json"), ("DELETE", "/api/trajectories/{run}"),
    ("POST", "/api/trajectories/{run}/finish"), ("POST", "/api/policies/0/rollback?alias=agent"), ("GET", "/api"),
]  # fmt: skip


def test_without_keys_the_proxys_own_pages_and_programs_are_accepted(proxy: Proxy) -> None:
    own = str(proxy.http.base_url).rstrip("/")
    for headers in (
        {},
        {"origin": own, "sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none"},
        {"sec-fetch-site": "same-origin"},
    ):
        run = proxy.http.post(
            "/v1/chat/completions", json={"model": "agent", "messages": [{"role": "user", "content": "hi"}]},
            headers=headers,
        ).headers["x-ratchet-trajectory"]  # fmt: skip
        feedback = proxy.http.post("/api/feedback", json={"trajectory_id": run, "value": 1}, headers=headers)
        assert (feedback.status_code, proxy.http.get("/api/calls", headers=headers).status_code) == (201, 200)
    proxy.settled()
    assert [(one.source, one.trusted) for one in proxy.store.feedback.page(9)] == [("operator", True)] * 4


def test_without_keys_an_allowed_local_page_may_call_models_but_not_the_operator_api(start: Start) -> None:
    page = {"origin": "http://localhost:3000", "sec-fetch-site": "same-site"}
    proxy = start(allowed_origins=(page["origin"], "https://app.example.com"))
    body = {"model": "agent", "messages": [{"role": "user", "content": "hi"}]}
    answer = proxy.http.post("/v1/chat/completions", json=body, headers=page)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, page["origin"])
    run = answer.headers["x-ratchet-trajectory"]
    assert proxy.http.post("/api/feedback", json={"trajectory_id": run, "value": 1}, headers=page).status_code == 201
    assert proxy.http.get("/api/feedback", headers=page).status_code == 403
    assert proxy.http.get("/v1/models", headers={"origin": "http://localhost:3001"}).status_code == 403
    assert proxy.http.get("/v1/models", headers={"origin": "https://app.example.com"}).status_code == 403
    proxy.settled()
    assert [(one.source, one.trusted) for one in proxy.store.feedback.page(9)] == [("anyone", False)]


def test_with_keys_any_host_name_is_accepted(start: Start) -> None:
    proxy = start(ready=False, key_hashes=frozenset({hash_key(b"good")}))
    headers = {"authorization": "Bearer good", "host": "ratchet.internal", "origin": "https://app.internal"}
    assert proxy.http.get("/v1/models", headers=headers).status_code == 200


def test_a_busy_port_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        values = VALUES | {"store": str(tmp_path / "s.db"), "journal": tmp_path / "j", "port": taken.getsockname()[1]}
        with pytest.raises(ProxyError, match="another --port"):
            serve(ProxySettings(**values))


@pytest.mark.slow
def test_the_proxy_imports_nothing_heavy_and_less_of_its_own_than_of_its_libraries() -> None:
    libraries = (
        "fastapi, httpx, numpy, prometheus_client, sqlalchemy.dialects.postgresql, sqlalchemy.dialects.sqlite, uvicorn"
    )
    program = (
        f"import sys, time; import {libraries}; libraries = time.process_time(); "
        "import ratchet.proxy.app, ratchet.proxy.server; own = time.process_time() - libraries; "
        "import ratchet.proxy.coordinator.operator_api.routes; print(own / libraries); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'scipy', 'openai', 'datasets', 'ratchet.trainer')))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1.0  # a ratio, because a busy machine slows both


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
