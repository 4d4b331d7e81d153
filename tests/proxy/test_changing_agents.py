"""Agents join and leave while the proxy serves: nobody else notices."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp

from ratchet.proxy.app import ProxyApplication
from ratchet.store.store import Store
from tests.harness.proxy.running_proxy import running
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import eventually
from tests.proxy.test_agents import AGENTS, USER, call, several
from tests.proxy.test_keys import bearer, made


class Changing:
    """A running proxy whose agents change."""

    def __init__(self, stack: ExitStack, url: str, store: Store, folder: Path, **settings: Any) -> None:
        self._app: ProxyApplication | None = None
        self._loop: Any = None
        self.proxy = stack.enter_context(running(url, store, folder, around=self._around, **settings))

    def _around(self, app: ASGIApp) -> ASGIApp:
        assert isinstance(app, ProxyApplication)
        self._app = app

        async def inner(scope: Any, receive: Any, send: Any) -> None:
            self._loop = asyncio.get_running_loop()
            await app(scope, receive, send)

        return inner

    def set_agents(self, *names: str) -> None:
        """Change the agents in the proxy's own thread; raises what it raises."""
        raised: list[BaseException] = []
        done = threading.Event()

        def change() -> None:
            try:
                assert self._app is not None
                self._app.set_agents(names)
            except ValueError as error:
                raised.append(error)
            done.set()

        self._loop.call_soon_threadsafe(change)
        assert done.wait(60)
        if raised:
            raise raised[0]


@pytest.fixture
def joined(vllm_url: str, store: Store, tmp_path: Path) -> Iterator[Changing]:
    """A proxy of three agents, which a test changes."""
    with ExitStack() as stack:
        yield Changing(stack, vllm_url, store, tmp_path, **several())


def test_an_agent_that_joins_under_load_serves_within_seconds_and_costs_no_call(joined: Changing) -> None:
    proxy, stop, failures = joined.proxy, threading.Event(), []

    def load(agent: str) -> int:
        count = 0
        while not stop.is_set():
            answer = call(proxy, agent)
            count += 1
            if answer.status_code != 200:
                failures.append(answer.text)
        return count

    with ThreadPoolExecutor(3) as pool:
        running_loads = [pool.submit(load, agent) for agent in AGENTS]
        assert call(proxy, "new").status_code == 404
        joined.set_agents(*AGENTS, "new")
        assert proxy.http.get("/health/ready").json()["agents"].keys() == {*AGENTS, "new"}
        began = time.monotonic()
        eventually(lambda: call(proxy, "new").status_code == 200)
        took = time.monotonic() - began
        ready = proxy.http.get("/health/ready")
        assert (ready.status_code, ready.json()["agents"]["new"]) == (200, "serving")
        stop.set()
        assert all(done.result() > 0 for done in running_loads)
    assert failures == []
    assert took < 10, "seconds"
    assert proxy.store.policies.get("new", 0).version == 0
    cards = [card["id"] for card in proxy.http.get("/v1/models").json()["data"]]
    assert "new" in cards
    assert "new@0" in cards


def test_an_agent_that_leaves_finishes_what_it_began(joined: Changing, vllm: ScriptedVllm, store: Store) -> None:
    proxy = joined.proxy
    first = call(proxy, "support", messages=[{"role": "user", "content": "#say=begun"}])
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(call, proxy, "support", messages=[{"role": "user", "content": "#wait=1.5 go"}], stream=True)
        eventually(lambda: "#wait=1.5" in str(vllm.calls))
        joined.set_agents("mail", "code")
        assert call(proxy, "support").status_code == 404
        assert call(proxy, "support@0").status_code == 404
        assert slow.result().status_code == 200
    assert slow.result().text.rstrip().endswith("data: [DONE]")
    follow = [{"role": "user", "content": "#say=begun"}, {"role": "assistant", "content": "begun"}, USER]
    goes_on = call(proxy, "support", messages=follow)
    assert goes_on.headers["x-ratchet-trajectory"] == first.headers["x-ratchet-trajectory"]
    assert [card["id"] for card in proxy.http.get("/v1/models").json()["data"]] == ["mail", "code", "code@0", "mail@0"]
    metrics = proxy.http.get("/metrics").text
    assert 'ratchet_policy_version{alias="support"}' not in metrics
    assert 'ratchet_policy_version{alias="mail"} 0.0' in metrics
    proxy.settled()
    assert {run.alias for run in store.trajectories.page()} == {"support"}, "records are kept"
    assert call(proxy, "mail").status_code == 200
    joined.set_agents(*AGENTS)
    eventually(lambda: call(proxy, "support").status_code == 200)


def test_agents_that_cannot_be_served_change_nothing(joined: Changing) -> None:
    with pytest.raises(ValueError, match="differ by case only"):
        joined.set_agents("mail", "MAIL")
    assert call(joined.proxy, "support").status_code == 200


def test_a_key_can_be_limited_to_an_agent_that_comes_later(joined: Changing, store: Store) -> None:
    key, _ = made(store, agents=("later",))
    proxy = joined.proxy
    eventually(lambda: "there are: none" in call(proxy, "later", key=key).text)
    assert call(proxy, "later", key=key).status_code == 404
    assert proxy.http.get("/v1/models", headers=bearer(key)).json()["data"] == []
    joined.set_agents(*AGENTS, "later")
    eventually(lambda: call(proxy, "later", key=key).status_code == 200)
