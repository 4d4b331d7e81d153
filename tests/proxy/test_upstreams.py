"""Upstreams: choice by load and shared prefix, failures, and replicas that come and go."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from ratchet.proxy.errors import UpstreamUnreachable
from ratchet.proxy.telemetry.metrics import ProxyMetrics
from ratchet.proxy.upstreams.circuit_breaker import BreakerState, CircuitBreaker
from ratchet.proxy.upstreams.http_connection import HttpResponse
from ratchet.proxy.upstreams.replica_pool import Replica, ReplicaPool
from ratchet.proxy.upstreams.replica_probes import ReplicaProbes
from ratchet.store.store import Store
from tests.harness.proxy.raw_upstream import http, raw_upstream
from tests.harness.proxy.running_proxy import Proxy, Start
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import VllmProcess, eventually, served
from tests.proxy.test_policy import promote

URLS = [f"http://replica-{number}" for number in range(4)]


def body(text: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": "agent", "messages": [{"role": "user", "content": text}], **fields}


def pool(urls: Sequence[str] = URLS) -> ReplicaPool[Replica]:
    return ReplicaPool(
        [Replica(url, CircuitBreaker(failures=1, cool_off=1.0)) for url in urls], ProxyMetrics(), slack=3
    )


# --- routing --------------------------------------------------------------------------------------------------


def test_a_trajectory_stays_with_its_replica_and_every_replica_gets_some() -> None:
    replicas = pool()
    places = {name: replicas.order(name)[0].url for name in (f"traj_{n}" for n in range(200))}
    assert places == {name: replicas.order(name)[0].url for name in places}
    assert {list(places.values()).count(url) > 20 for url in URLS} == {True}


def test_a_trajectory_leaves_a_replica_that_is_busier_than_the_slack_and_returns() -> None:
    replicas = pool()
    own, second = replicas.order("traj_1")[:2]
    own.in_flight = 2
    assert replicas.order("traj_1")[0] is own
    own.in_flight = 3
    assert replicas.order("traj_1")[0] is second
    own.in_flight = 0
    assert replicas.order("traj_1")[0] is own


def test_an_open_breaker_moves_only_the_trajectories_of_its_replica_and_spreads_them() -> None:
    replicas = pool()
    names = [f"traj_{n}" for n in range(200)]
    before = {name: replicas.order(name)[0].url for name in names}
    replicas.mark_failed(replicas.replicas[0], "gone")
    after = {name: replicas.order(name)[0].url for name in names}
    assert {name for name in names if before[name] != after[name]} == {n for n in names if before[n] == URLS[0]}
    assert {after[name] for name in names if before[name] == URLS[0]} == set(URLS[1:])
    for replica in replicas.replicas:
        replicas.mark_failed(replica, "gone")
    assert replicas.order("traj_1"), "with all breakers open a call is tried nevertheless"


def test_a_call_without_a_trajectory_goes_to_the_least_busy() -> None:
    replicas = pool()
    for busy, replica in enumerate(reversed(replicas.replicas)):
        replica.in_flight = busy
    assert [replica.url for replica in replicas.order("")] == URLS[:0:-1]


def test_a_breaker_opens_after_failures_in_a_row_and_is_probed_after_its_cool_off() -> None:
    breaker = CircuitBreaker(failures=2, cool_off=10.0)
    assert not breaker.fail(0.0)
    assert not breaker.succeed()
    assert not breaker.fail(1.0)
    assert breaker.fail(2.0)
    assert [breaker.state(now) for now in (2.0, 11.9, 12.0)] == [
        BreakerState.OPEN,
        BreakerState.OPEN,
        BreakerState.HALF_OPEN,
    ]
    assert not breaker.fail(12.0)  # the probe
    assert [breaker.state(now) for now in (12.0, 21.9, 22.0)] == [
        BreakerState.OPEN,
        BreakerState.OPEN,
        BreakerState.HALF_OPEN,
    ]
    assert breaker.succeed()
    assert breaker.state(22.0) == BreakerState.CLOSED


# --- failover -------------------------------------------------------------------------------------------------


@pytest.fixture
def second() -> Iterator[tuple[ScriptedVllm, str]]:
    """Another replica."""
    app = ScriptedVllm()
    with served(app) as url:
        yield app, url


def failing(apps: list[ScriptedVllm], status: int, count: int) -> None:
    for app in apps:
        app.failure, app.failures_left = status, count


@pytest.mark.slow
@pytest.mark.parametrize("status", [429, 502, 503, 504])
@pytest.mark.parametrize("stream", [False, True])
def test_another_replica_answers_if_the_first_is_full_or_dead(
    start: Start, vllm: ScriptedVllm, vllm_url: str, second: tuple[ScriptedVllm, str], status: int, stream: bool
) -> None:
    proxy = start(upstreams=(vllm_url, second[1]))
    vllm.failure, vllm.failures_left = status, 1000
    answers = [proxy.http.post("/v1/chat/completions", json=body(f"{n}", stream=stream)) for n in range(20)]
    assert [answer.status_code for answer in answers] == [200] * 20
    assert len(second[0].calls) == 20
    retries = f'ratchet_upstream_retries_total{{reason="status_{status}"}} {len(vllm.calls):.1f}'
    assert retries in proxy.http.get("/metrics").text
    full = status == 429  # no failure: the breaker stays closed, and half of the calls come here first
    assert (len(vllm.calls) == 3) is not full
    assert (f'ratchet_upstream_up{{upstream="{vllm_url}"}} {float(full)}') in proxy.http.get("/metrics").text


@pytest.mark.parametrize("status", [400, 404, 409, 422, 500])
def test_errors_of_the_model_itself_are_not_retried(
    start: Start, vllm: ScriptedVllm, vllm_url: str, second: tuple[ScriptedVllm, str], status: int
) -> None:
    proxy = start(upstreams=(vllm_url, second[1]))
    failing([vllm, second[0]], status, 1000)
    answers = [proxy.http.post("/v1/chat/completions", json=body(f"{n}")) for n in range(8)]
    assert [answer.status_code for answer in answers] == [status] * 8
    assert len(vllm.calls) + len(second[0].calls) == 8


@pytest.mark.parametrize("kept", [False, True])
def test_a_request_that_disconnects_its_replica_is_retried_once_at_most(start: Start, kept: bool) -> None:
    with contextlib.ExitStack() as stack:
        replicas = [stack.enter_context(raw_upstream()) for _ in range(4)]
        proxy = start(upstreams=tuple(replica.url for replica in replicas), breaker_failure_threshold=1000)
        if kept:  # each has answered over a kept-alive connection
            for replica in replicas:
                replica.answer, replica.keeps = http(b"{}", status=400), True
            texts = map(str, itertools.count())  # equal beginnings would go to one replica

            def all_have_answered() -> bool:
                proxy.http.post("/v1/chat/completions", json=body(next(texts)))
                return all(replica.posts for replica in replicas)

            eventually(all_have_answered)
        for replica in replicas:
            replica.answer, replica.keeps, replica.posts = b"", False, 0
        answer = proxy.http.post("/v1/chat/completions", json=body("poison"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_disconnected")
        assert sum(replica.posts > 0 for replica in replicas) == 2
        retries = 'ratchet_upstream_retries_total{reason="upstream_disconnected"} 1.0'
        assert retries in proxy.http.get("/metrics").text


def test_a_request_that_was_not_sent_is_retried_freely(start: Start, vllm_url: str) -> None:
    proxy = start(upstreams=("http://127.0.0.1:9", "http://127.0.0.1:10", vllm_url), breaker_failure_threshold=1000)
    answers = [proxy.http.post("/v1/chat/completions", json=body(f"{n}")) for n in range(12)]
    assert [answer.status_code for answer in answers] == [200] * 12


def test_when_all_replicas_fail_the_first_failure_is_returned_unchanged(
    start: Start, vllm: ScriptedVllm, vllm_url: str, second: tuple[ScriptedVllm, str]
) -> None:
    proxy = start(upstreams=(vllm_url, second[1]))
    assert proxy.http.post("/t/job/v1/chat/completions", json=body()).status_code == 200
    first, other = (vllm, second[0]) if vllm.calls else (second[0], vllm)  # the trajectory stays where it was answered
    failing([first], 429, 1)
    failing([other], 503, 1)
    answer = proxy.http.post("/t/job/v1/chat/completions", json=body())
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert answer.json()["error"]["message"] == "overloaded"


@pytest.mark.slow
def test_readiness_needs_one_replica_and_names_those_that_are_down(start: Start, vllm_url: str) -> None:
    proxy = start(upstreams=("http://127.0.0.1:9", vllm_url))
    ready = proxy.http.get("/health/ready")
    assert ready.status_code == 200
    dead, well = ready.json()["upstreams"]
    assert (dead["url"], dead["up"], well["up"]) == ("http://127.0.0.1:9", False, True)
    assert "http://127.0.0.1:9 cannot be reached" in dead["reason"]
    eventually(lambda: proxy.http.get("/health/ready").json()["upstreams"][0]["breaker"] != "closed")


def test_calls_get_retry_after_while_all_replicas_are_known_to_be_down(start: Start, store: Store) -> None:
    store.policies.register_base("agent", "base")
    proxy = start(
        ready=False, upstreams=("http://127.0.0.1:9",), breaker_failure_threshold=100, breaker_reset_seconds=600
    )
    answers = [proxy.http.post("/v1/chat/completions", json=body()) for _ in range(100)]
    assert {answer.status_code for answer in answers} == {502}
    assert "retry-after" not in answers[0].headers
    assert answers[-1].headers["retry-after"] == "600"
    assert proxy.http.get("/v1/passed/on").headers["retry-after"] in ("600", "599")


def test_an_agent_does_not_learn_where_the_upstream_is_and_the_log_does(
    start: Start, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    store.policies.register_base("agent", "base")
    with raw_upstream() as upstream:
        proxy = start(upstreams=(upstream.url, "http://127.0.0.1:9"))
        for upstream.answer in (b"", http(b"{}", 302), http(b"{}", length=99), b"no HTTP"):
            for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
                for streamed in (False, True):
                    answer = proxy.http.post(path, json=body(input="hi", max_tokens=9, stream=streamed))
                    assert "the upstream of agent@0 " in answer.text
                    assert "127.0.0.1" not in answer.text
        passed_on = proxy.http.post("/v1/embeddings", json=body())
        assert (passed_on.status_code, "127.0.0.1" in passed_on.text) == (502, False)
    for reason in (
        f"upstream {upstream.url} broke off its response: ",
        "upstream http://127.0.0.1:9 cannot be reached: ",
    ):
        assert reason in caplog.text
    assert "event=upstream_failed path='/v1/embeddings' reason='upstream http" in caplog.text


def test_readiness_uses_the_latest_probe_and_calls_no_replica(start: Start, vllm: ScriptedVllm, vllm_url: str) -> None:
    proxy = start(probe_interval_seconds=600.0, breaker_reset_seconds=600.0)
    looks = len(vllm.paths)
    for _ in range(100):
        ready = proxy.http.get("/health/ready")
        assert (ready.status_code, ready.json()["upstreams"][0]["up"]) == (200, True)
    assert len(vllm.paths) == looks


def test_readiness_requests_open_no_breaker_of_a_slow_replica(start: Start, store: Store) -> None:
    store.policies.register_base("agent", "base")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts connections and never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        proxy = start(
            ready=False,
            upstreams=(url,),
            probe_interval_seconds=600.0,
            breaker_reset_seconds=600.0,
            breaker_failure_threshold=1,
        )
        for _ in range(200):
            ready = proxy.http.get("/health/ready")
            assert ready.status_code == 503
            assert ready.json()["upstreams"][0]["breaker"] == "closed"


async def test_a_breaker_opens_after_several_failed_probes_in_a_row() -> None:
    replicas, hanging = pool(URLS[:1]), [True]

    async def ask(_: Replica) -> None:
        if hanging[0]:
            raise TimeoutError

    probes = ReplicaProbes(replicas, ask, interval=1.0)
    for slow in (True, True, False, True, True):
        hanging[0] = slow
        await probes.probe(replicas.replicas[0])
        assert probes.last_results()[0]["breaker"] == "closed"
    await probes.probe(replicas.replicas[0])
    assert probes.last_results()[0]["breaker"] == "open"
    hanging[0] = False
    await probes.probe(replicas.replicas[0])
    assert probes.last_results()[0]["breaker"] == "closed"


class ContinuousCalls:
    """Agents that call without a pause, and the result of each call."""

    def __init__(self, url: str) -> None:
        self.whole: list[int] = []
        self.streams: list[str] = []
        self._url = url
        self._stop = threading.Event()

    def run(self, number: int) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as client:
            turn = number
            while not self._stop.is_set():
                turn += 1
                request = body(f"{turn} #tokens=10 #delay=0.005", stream=bool(turn % 2))
                answer = client.post("/v1/chat/completions", json=request)
                if turn % 2:
                    assert answer.status_code == 200
                    self.streams.append(answer.text)
                else:
                    self.whole.append(answer.status_code)

    def stop(self) -> None:
        self._stop.set()


def states(proxy: Proxy) -> list[str]:
    return [upstream["breaker"] for upstream in proxy.http.get("/health/ready").json()["upstreams"]]


@pytest.mark.slow
def test_a_replica_killed_under_load_fails_only_started_streams_and_returns_with_its_adapter(
    start: Start,
) -> None:
    replicas = [VllmProcess(), VllmProcess()]
    try:
        proxy = start(upstreams=tuple(replica.url for replica in replicas), breaker_reset_seconds=0.3)
        promote(proxy, 1)
        load = ContinuousCalls(proxy.url)
        with ThreadPoolExecutor(8) as threads:
            runs = [threads.submit(load.run, number) for number in range(8)]
            eventually(lambda: len(load.whole) > 40)
            replicas[0].kill()
            killed_at = len(load.whole)
            eventually(lambda: len(load.whole) > killed_at + 40)
            assert states(proxy)[1] == "closed"
            assert states(proxy)[0] != "closed"
            assert f'ratchet_upstream_up{{upstream="{replicas[0].url}"}} 0.0' in proxy.http.get("/metrics").text
            replicas[0].start()
            eventually(lambda: states(proxy) == ["closed", "closed"])
            back_at = len(load.whole)
            eventually(lambda: len(load.whole) > back_at + 40)
            load.stop()
            for run in runs:
                run.result()
        assert set(load.whole) == {200}
        cut = [text for text in load.streams if not text.endswith("data: [DONE]\n\n")]
        assert len(cut) <= 8, "only those under way at the kill"
        assert all("chat.completion.chunk" in text and "upstream_disconnected" in text for text in cut)
        assert httpx.get(replicas[0].url + "/v1/models").json()["data"][1]["id"] == "agent@1"
        in_flight = f'ratchet_upstream_in_flight{{upstream="{replicas[0].url}"}} 0.0'
        assert in_flight in proxy.http.get("/metrics").text
    finally:
        for replica in replicas:
            replica.kill()


TOOLS: Any = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}]


def prefix_pool(slack: int = 16) -> ReplicaPool[Replica]:
    return ReplicaPool([Replica(url, CircuitBreaker(failures=1, cool_off=1.0)) for url in URLS], ProxyMetrics(), slack)


def serve(replicas: ReplicaPool[Replica], trajectory: str, prefix: str) -> Replica:
    """Return the replica that gets a call; the call stays in flight."""
    used: list[Replica] = []

    async def send(replica: Replica) -> HttpResponse:
        used.append(replica)
        return cast("HttpResponse", OpenAnswer())

    asyncio.run(replicas.send(trajectory, send, prefix=prefix))
    return used[-1]


class OpenAnswer(HttpResponse):
    """A response that stays open."""

    def __init__(self) -> None:
        self.status = 200

    def on_close(self, closed: Any) -> None:
        """Never closed."""


def test_trajectories_that_begin_alike_share_a_replica_and_others_spread() -> None:
    replicas = prefix_pool()
    alike = {replicas.order(f"traj_{n}", prefix="agent@1 task 7")[0].url for n in range(100)}
    assert len(alike) == 1
    tasks = Counter(replicas.order("traj", prefix=f"agent@1 task {n}")[0].url for n in range(400))
    assert min(tasks.values()) > 60, f"prefixes spread over all replicas: {tasks}"
    versions = {replicas.order("traj", prefix=f"agent@{n} task 7")[0].url for n in range(40)}
    assert versions == set(URLS), "versions share no cache entries"


def test_within_the_slack_a_popular_prefix_takes_one_replica_and_beyond_it_all() -> None:
    replicas = prefix_pool(slack=4)
    first = [serve(replicas, f"traj_{n}", "agent@1 popular").url for n in range(4)]
    assert len(set(first)) == 1
    for number in range(4, 100):
        serve(replicas, f"traj_{number}", "agent@1 popular")
    loads = [replica.in_flight for replica in replicas.replicas]
    assert (sum(loads), max(loads) - min(loads) <= 4) == (100, True), loads


def test_a_trajectory_stays_where_it_was_answered() -> None:
    replicas = prefix_pool(slack=4)
    preferred = replicas.order("traj_a", prefix="p")[0]
    preferred.in_flight = 4
    moved = serve(replicas, "traj_a", "p")
    assert moved is not preferred
    preferred.in_flight = 0
    assert replicas.order("traj_a", prefix="p")[0] is moved, "its own prefix is longer than the shared one"
    moved.in_flight = 4
    assert replicas.order("traj_a", prefix="p")[0] is not moved
    moved.in_flight = 0
    replicas.mark_failed(moved, "gone")
    assert moved not in replicas.order("traj_a", prefix="p")


@pytest.fixture
def three() -> Iterator[list[tuple[ScriptedVllm, str]]]:
    apps = [ScriptedVllm() for _ in range(3)]
    with served(apps[0]) as one, served(apps[1]) as two, served(apps[2]) as last:
        yield list(zip(apps, (one, two, last), strict=True))


def ask_with_prefix(proxy: Proxy, job: str, *texts: str, **fields: Any) -> None:
    messages: list[Any] = [{"role": "system", "content": "You are kind."}]
    for text in texts:
        messages.append({"role": "user", "content": text})
        sent = {"model": "agent", "messages": messages, **fields}
        answer = proxy.http.post(f"/t/{job}/v1/chat/completions", json=sent)
        assert answer.status_code == 200
        messages.append(answer.json()["choices"][0]["message"])


def test_attempts_at_one_task_share_a_replica(start: Start, three: list[tuple[ScriptedVllm, str]]) -> None:
    proxy = start(upstreams=tuple(url for _, url in three))
    for number in range(6):
        ask_with_prefix(proxy, f"attempt-{number}", "task seven", f"turn {number}", tools=TOOLS)
    served_by = [SimpleNamespace(app=app, calls=len(app.calls)) for app, _ in three if app.calls]
    assert [one.calls for one in served_by] == [12], "every turn of every attempt"
    for number in range(40):
        ask_with_prefix(proxy, f"other-{number}", f"task {number}")
    assert all(app.calls for app, _ in three)


def test_a_version_goes_only_to_the_replicas_that_are_proven_to_serve_it() -> None:
    replicas = pool()
    proven = [URLS[1], URLS[3]]
    firsts = {replicas.order(f"traj_{n}", proven)[0].url for n in range(100)}
    assert firsts == set(proven)
    assert {replica.url for replica in replicas.order("", proven)} == set(proven)
    replicas.mark_failed(replicas.replicas[1], "gone")
    replicas.mark_failed(replicas.replicas[3], "gone")
    assert {replica.url for replica in replicas.order("traj", proven)} == set(proven)  # never an unproven one


def test_if_every_proven_replica_has_left_the_others_serve() -> None:
    assert len(pool().order("traj", ["http://left"])) == 3


def test_without_a_replica_the_error_names_the_reason() -> None:
    with pytest.raises(UpstreamUnreachable, match="list of upstreams is empty"):
        pool([]).order("traj")


def test_a_trajectory_keeps_its_replica_when_another_joins_or_leaves() -> None:
    replicas = pool(URLS[:3])
    names = [f"traj_{n}" for n in range(100)]
    before = {name: replicas.order(name)[0].url for name in names}
    replicas.replace([*replicas.replicas, *pool(URLS[3:]).replicas])
    after = {name: replicas.order(name)[0].url for name in names}
    assert {after[name] for name in names if after[name] != before[name]} == {URLS[3]}


_numbers = itertools.count()  # each trajectory begins in its own way, so that they spread


def say(proxy: Proxy, model: str, times: int = 12) -> None:
    agent = proxy.agent()
    for _ in range(times):
        agent.chat.completions.create(model=model, messages=[{"role": "user", "content": f"{next(_numbers)} {model}"}])


@pytest.mark.slow
def test_replicas_come_and_go_while_the_proxy_runs(
    start: Start, vllm: ScriptedVllm, vllm_url: str, second: tuple[ScriptedVllm, str], tmp_path: Path
) -> None:
    file = tmp_path / "replicas.txt"
    file.write_text(f"{vllm_url}\n")
    proxy = start(upstreams=(f"file:{file}",))
    promote(proxy, 1)
    proxy.store.policies.record_replicas("agent", "agent@1", [vllm_url])
    file.write_text(f"{vllm_url}\n{second[1]}\n")

    def upstreams() -> set[str]:
        return {one["url"] for one in proxy.http.get("/health/ready").json()["upstreams"] if one["up"]}

    eventually(lambda: upstreams() == {vllm_url, second[1]})
    eventually(lambda: vllm_url in str(proxy.http.get("/metrics").text))
    before = len(second[0].calls)
    say(proxy, "agent")
    assert len(second[0].calls) == before  # the new one is not proven yet
    proxy.store.policies.record_replicas("agent", "agent@1", [vllm_url, second[1]])

    def reached() -> bool:
        say(proxy, "agent", 2)
        return len(second[0].calls) > before

    eventually(reached)
    file.write_text(f"{second[1]}\n")
    eventually(lambda: upstreams() == {second[1]})
    gone = len(vllm.calls)
    say(proxy, "agent")
    assert len(vllm.calls) == gone
    assert f'upstream="{vllm_url}"' not in proxy.http.get("/metrics").text
    file.write_text("not a url\n")  # leaves the list as it is
    say(proxy, "agent", 2)


@pytest.mark.slow
def test_a_replica_that_leaves_is_drained_as_metrics_show(
    start: Start, vllm: ScriptedVllm, vllm_url: str, second: tuple[ScriptedVllm, str], tmp_path: Path
) -> None:
    file = tmp_path / "replicas.txt"
    file.write_text(f"{vllm_url}\n")
    proxy = start(upstreams=(f"file:{file}",))
    long = {"model": "agent", "stream": True, "messages": [{"role": "user", "content": "#tokens=9000 #delay=0.05"}]}

    def shown(name: str) -> str | None:
        found = [
            line for line in proxy.http.get("/metrics").text.splitlines() if line.startswith(name) and vllm_url in line
        ]
        return found[0].split()[-1] if found else None

    with httpx.stream("POST", f"{proxy.url}/v1/chat/completions", json=long, timeout=60) as answer:
        pieces = answer.iter_raw()
        next(pieces)
        file.write_text(f"{second[1]}\n")
        eventually(lambda: shown("ratchet_upstream_up") == "0.0")
        assert shown("ratchet_upstream_in_flight") == "1.0"
        say(proxy, "agent", 3)
        assert len(vllm.calls) == 1, "a replica that drains gets no new calls"
        next(pieces)
    eventually(lambda: shown("ratchet_upstream_in_flight") is None)


def test_a_replica_that_comes_back_while_it_drains_serves_again() -> None:
    replicas = pool(URLS[:2])
    one, two = replicas.replicas
    one.in_flight = 1
    replicas.replace([two])
    assert (replicas.draining, one.is_up()) == ((one,), False)
    replicas.replace([one, two])
    assert (replicas.draining, one.is_up()) == ((), True)
    one.release()
    assert one in replicas.order("traj")
