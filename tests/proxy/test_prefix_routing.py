"""Routing by shared prefix: trajectories that begin alike go to one replica, within the load slack, and stay there."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ratchet.proxy.telemetry.metrics import ProxyMetrics
from ratchet.proxy.upstreams.circuit_breaker import CircuitBreaker
from ratchet.proxy.upstreams.http_connection import HttpResponse
from ratchet.proxy.upstreams.replica_pool import Replica, ReplicaPool
from tests.harness.proxy.running_proxy import Proxy, Start
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import served
from tests.proxy.test_upstreams import URLS

TOOLS: Any = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}]


def pool(slack: int = 16) -> ReplicaPool[Replica]:
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
    replicas = pool()
    alike = {replicas.order(f"traj_{n}", prefix="agent@1 task 7")[0].url for n in range(100)}
    assert len(alike) == 1
    tasks = Counter(replicas.order("traj", prefix=f"agent@1 task {n}")[0].url for n in range(400))
    assert min(tasks.values()) > 60, f"prefixes spread over all replicas: {tasks}"
    versions = {replicas.order("traj", prefix=f"agent@{n} task 7")[0].url for n in range(40)}
    assert versions == set(URLS), "versions share no cache entries"


def test_within_the_slack_a_popular_prefix_takes_one_replica_and_beyond_it_all() -> None:
    replicas = pool(slack=4)
    first = [serve(replicas, f"traj_{n}", "agent@1 popular").url for n in range(4)]
    assert len(set(first)) == 1
    for number in range(4, 100):
        serve(replicas, f"traj_{number}", "agent@1 popular")
    loads = [replica.in_flight for replica in replicas.replicas]
    assert (sum(loads), max(loads) - min(loads) <= 4) == (100, True), loads


def test_a_trajectory_stays_where_it_was_answered() -> None:
    replicas = pool(slack=4)
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


def say(proxy: Proxy, job: str, *texts: str, **fields: Any) -> None:
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
        say(proxy, f"attempt-{number}", "task seven", f"turn {number}", tools=TOOLS)
    served_by = [SimpleNamespace(app=app, calls=len(app.calls)) for app, _ in three if app.calls]
    assert [one.calls for one in served_by] == [12], "every turn of every attempt"
    for number in range(40):
        say(proxy, f"other-{number}", f"task {number}")
    assert all(app.calls for app, _ in three)
