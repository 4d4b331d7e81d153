"""Replicas that come and go while the proxy runs; a version is served only where it is proven."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ratchet.proxy.errors import UpstreamUnreachable
from tests.harness.proxy.running_proxy import Proxy, Start
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import eventually, served
from tests.proxy.test_policy import promote
from tests.proxy.test_upstreams import URLS, pool


@pytest.fixture
def second() -> Iterator[tuple[ScriptedVllm, str]]:
    app = ScriptedVllm()
    with served(app) as url:
        yield app, url


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
