"""Limits of parallel requests: a bounded queue in front, fair between keys, and refusals that real clients retry."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx
import pytest

from ratchet.proxy.coordinator.keys.key_cache import Caller
from ratchet.proxy.errors import ClientDisconnected, NotReady, RateLimited
from ratchet.proxy.wire.asgi import CALLER, CLIENT_LEFT
from ratchet.proxy.worker.http.parallel_requests import ParallelRequests, QueueLimits
from ratchet.store.store import Store
from tests.harness.proxy.running_proxy import Proxy, Start
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import eventually, leave
from tests.proxy.test_keys import bearer, made

CHAT: Any = {"model": "agent", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}
LONG: Any = {**CHAT, "max_tokens": 10_000, "messages": [{"role": "user", "content": "#tokens=9000 #delay=0.05"}]}
MANY = 1000


class Held:
    """An application whose requests run until they are let go. `order` has the names of those that began."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self._gates: dict[str, asyncio.Event] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.order.append(scope["name"])
        gate = self._gates[scope["name"]] = asyncio.Event()
        await gate.wait()

    async def let_go(self, name: str) -> None:
        self._gates[name].set()
        await turn()


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def limited(limit: int | None = None, waiting: int = MANY, per_key: int = MANY, seconds: float = 600.0) -> Any:
    app = Held()
    return app, ParallelRequests(app, QueueLimits(limit, waiting, per_key, seconds))


def ask(requests: ParallelRequests, key: str, name: str, limit: int | None = None, has_left: Any = None) -> Any:
    caller = Caller(key, max_parallel_requests=limit)
    base = {CALLER: caller, "method": "POST", "path": "/v1/chat/completions", "name": name, CLIENT_LEFT: has_left}

    async def no_message(*_: Any) -> Any:
        raise AssertionError("no body is read while a request waits")

    return asyncio.ensure_future(requests(base, no_message, no_message))


def in_loop(test: Callable[[], Awaitable[None]]) -> Any:
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 60))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@in_loop
async def test_a_key_runs_no_more_than_its_limit_and_others_do_not_wait() -> None:
    app, requests = limited()
    tasks = [ask(requests, "a", f"a{n}", 2) for n in range(4)] + [ask(requests, "b", "b0")]
    await turn()
    assert (app.order, requests.waiting) == (["a0", "a1", "b0"], 2)
    await app.let_go("a1")
    assert (app.order[3:], requests.waiting) == (["a2"], 1)
    for name in ("a0", "a2", "a3", "b0"):
        await app.let_go(name)
    await asyncio.gather(*tasks)
    assert (requests.running, requests.waiting) == (0, 0)


@in_loop
async def test_between_keys_the_one_with_the_fewest_running_requests_is_next() -> None:
    app, requests = limited(2)
    tasks = [ask(requests, "a", f"a{n}") for n in range(5)] + [ask(requests, "b", "b0"), ask(requests, "b", "b1")]
    await turn()
    assert app.order == ["a0", "a1"]
    for name in ("a0", "a1", "b0", "a2", "b1", "a3", "a4"):
        await app.let_go(name)
    assert app.order == ["a0", "a1", "b0", "a2", "b1", "a3", "a4"], "b's requests came last and do not wait for all"
    await asyncio.gather(*tasks)


@in_loop
async def test_a_full_queue_and_a_long_wait_are_refused_by_whose_limit_it_is() -> None:
    app, requests = limited(2, waiting=2, per_key=1)
    running = [ask(requests, "a", "a0", 1), ask(requests, "b", "b0", 1)]
    await turn()
    waiting = ask(requests, "a", "a1", 1)
    with pytest.raises(RateLimited, match=r"the key's limit of 1 parallel requests .* queue"):
        await ask(requests, "a", "a2", 1)
    other = ask(requests, "c", "c0")
    await turn()
    with pytest.raises(NotReady, match=r"the proxy's limit of 2 .* max_parallel_requests"):
        await ask(requests, "d", "d0")
    for name in ("a0", "b0", "a1", "c0"):
        await app.let_go(name)
    await asyncio.gather(*running, waiting, other)
    assert app.order == ["a0", "b0", "a1", "c0"]
    app, requests = limited(seconds=0.01)
    first = ask(requests, "a", "a0", 1)
    with pytest.raises(RateLimited, match=r"it waited 0\.01 s"):
        await ask(requests, "a", "a1", 1)
    await app.let_go("a0")
    await first
    assert requests.waiting == 0


@in_loop
async def test_a_request_that_leaves_the_queue_takes_no_place_from_another() -> None:
    app, requests = limited(1, waiting=1)
    first, left = ask(requests, "a", "a0"), False
    await turn()
    gone = ask(requests, "b", "b0", has_left=lambda: left)
    await turn()
    left = True
    heir = ask(requests, "c", "c0")  # the queue is full with one whose client has disconnected
    with pytest.raises(ClientDisconnected):
        await gone
    await app.let_go("a0")
    assert app.order == ["a0", "c0"]
    stopped, late = ask(requests, "d", "d0"), False
    await turn()
    stopped.cancel()  # the server stops
    with pytest.raises(asyncio.CancelledError):
        await stopped
    last = ask(requests, "e", "e0", has_left=lambda: late)
    await turn()
    late = True
    await app.let_go("c0")
    with pytest.raises(ClientDisconnected):
        await last
    await asyncio.gather(first, heir)
    assert (requests.running, requests.waiting, app.order) == (0, 0, ["a0", "c0"])


@in_loop
async def test_a_request_that_is_cancelled_as_it_may_run_gives_its_place_on() -> None:
    app, requests = limited(1)
    first, second, third = (ask(requests, "a", name) for name in ("a0", "a1", "a2"))
    await turn()
    first.cancel()
    await asyncio.sleep(0)  # the first ends in this turn; the second may run in the next
    second.cancel()
    await asyncio.wait([first, second])
    await turn()
    assert app.order == ["a0", "a2"]
    await app.let_go("a2")
    await third
    assert (requests.running, requests.waiting) == (0, 0)


@pytest.fixture
def busy(start: Start, store: Store, vllm: ScriptedVllm) -> Iterator[tuple[Proxy, str, threading.Event]]:
    """A proxy whose only place is taken by a key's call, until the event is set; and that key."""
    key, _ = made(store, max_parallel_requests=1)
    proxy, free = start(max_waiting_requests=0), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        url = f"{proxy.url}/v1/chat/completions"
        held = pool.submit(leave, url, LONG, lambda: "#delay" in str(vllm.calls) and free.wait(), key)
        eventually(lambda: "#delay" in str(vllm.calls))
        try:
            yield proxy, key, free
        finally:
            free.set()
            held.result(60)


def test_refusals_have_each_dialects_form_and_name_the_limit(busy: tuple[Proxy, str, threading.Event]) -> None:
    proxy, key, _ = busy
    refused = proxy.http.post("/v1/chat/completions", json=CHAT, headers=bearer(key))
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"]["code"] == "too_many_parallel_requests"
    assert "the key's max_parallel_requests" in refused.json()["error"]["message"]
    refused = proxy.http.post("/v1/messages", json=CHAT, headers=bearer(key))
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
    assert proxy.http.get("/v1/models", headers=bearer(key)).status_code == 200, "only what may reach a model counts"
    assert 'ratchet_errors_total{class="rate_limited"} 2.0' in proxy.http.get("/metrics").text


@pytest.mark.slow
@pytest.mark.parametrize("sdk", ["openai", "anthropic"])
def test_the_sdks_retry_a_refusal_and_succeed(busy: tuple[Proxy, str, threading.Event], sdk: str) -> None:
    proxy, key, free = busy

    def create() -> Any:
        if sdk == "openai":
            return proxy.agent(key, max_retries=10).chat.completions.create(**CHAT)
        with anthropic.Anthropic(base_url=proxy.url, auth_token=key, max_retries=10) as client:
            return client.messages.create(**CHAT)

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(create)
        eventually(lambda: 'class="rate_limited"}' in proxy.http.get("/metrics").text)
        free.set()  # the place becomes free while the client waits
        assert answer.result(60).id


def test_the_limit_of_the_proxy_is_503_and_without_keys_all_share_one(start: Start, vllm: ScriptedVllm) -> None:
    proxy = start(max_parallel_requests=1, max_waiting_requests=0)
    refused: list[httpx.Response] = []

    def refuse() -> bool:
        if "#delay" in str(vllm.calls):
            refused.append(proxy.http.post("/v1/chat/completions", json=CHAT, headers=bearer("another")))
        return bool(refused)

    leave(f"{proxy.url}/v1/chat/completions", LONG, refuse)
    assert (refused[0].status_code, refused[0].headers["retry-after"]) == (503, "1")
    eventually(lambda: proxy.http.post("/v1/chat/completions", json=CHAT).status_code == 200)


def test_a_waiting_request_runs_when_its_turn_comes(start: Start, store: Store, vllm: ScriptedVllm) -> None:
    key, _ = made(store, max_parallel_requests=1)
    proxy = start(max_waiting_seconds=60)
    with ThreadPoolExecutor(3) as pool:
        waits: list[Any] = []

        def wait() -> bool:
            if "#delay" in str(vllm.calls) and not waits:
                agent: Any = proxy.agent(key, timeout=60)
                waits.extend(pool.submit(agent.chat.completions.create, **CHAT) for _ in "ab")
            return bool(waits) and "ratchet_requests_waiting 2.0" in proxy.http.get("/metrics").text

        leave(f"{proxy.url}/v1/chat/completions", LONG, wait, key)
        assert all(one.result(60).choices for one in waits)
    eventually(lambda: "ratchet_requests_waiting 0.0" in proxy.http.get("/metrics").text)
