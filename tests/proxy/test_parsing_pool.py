"""Large bodies are parsed in threads that the keys share fairly, and for clients that still wait only."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from ratchet.proxy.errors import ClientDisconnected
from ratchet.proxy.runtime.thread_pools import REQUESTER, FairPool, Requester
from tests.harness.proxy.running_proxy import Start


def run(pool: FairPool, key_id: str, function: Callable[[], object], has_left: bool = False) -> asyncio.Task[object]:
    """Run a function for a key, as the task of its request would."""

    async def serve() -> object:
        REQUESTER.set(Requester(key_id, lambda: has_left))
        return await pool.run(function)

    return asyncio.create_task(serve())


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_key_has_one_place_and_other_keys_go_before_its_next_body(threads: int) -> None:
    order: list[str] = []
    may_end = threading.Event()

    def parse(name: str, first: bool = False) -> Callable[[], object]:
        def read() -> None:
            if first:
                may_end.wait(60)
            order.append(name)

        return read

    async def serve() -> None:
        pool = FairPool(threads, "test")
        bodies = [run(pool, "a", parse(f"a{number}", first=number == 0)) for number in range(3)]
        await asyncio.sleep(0.01)
        others = [run(pool, key, parse(key)) for key in "bc"]
        if threads > 1:
            await asyncio.gather(*others)  # while the first body of a is parsed
            assert order == ["b", "c"]
        else:
            await asyncio.sleep(0.01)
        may_end.set()
        await asyncio.gather(*bodies, *others)

    asyncio.run(serve())
    assert order == (["b", "c", "a0", "a1", "a2"] if threads > 1 else ["a0", "b", "c", "a1", "a2"])


def test_work_is_not_started_for_a_client_that_has_left_or_a_request_that_was_cancelled() -> None:
    parsed: list[str] = []
    may_end = threading.Event()

    async def serve() -> None:
        pool = FairPool(2, "test")
        first = run(pool, "a", lambda: may_end.wait(60))
        left = run(pool, "a", lambda: parsed.append("left"), has_left=True)
        cancelled = run(pool, "a", lambda: parsed.append("cancelled"))
        last = run(pool, "a", lambda: parsed.append("last"))
        await asyncio.sleep(0.01)
        cancelled.cancel()
        await asyncio.sleep(0.01)
        may_end.set()
        await asyncio.gather(first, last)
        with pytest.raises(ClientDisconnected):
            await left

    asyncio.run(serve())
    assert parsed == ["last"]


def test_a_body_that_fails_is_released_without_a_collection() -> None:
    class LargeBody:
        size = 5

    def refuse(body: LargeBody) -> None:
        raise ValueError(str(body.size))

    async def serve(pool: FairPool) -> weakref.ref[LargeBody]:
        body = LargeBody()
        with pytest.raises(ValueError, match="5"):
            await pool.run(refuse, body)
        return weakref.ref(body)

    pool = FairPool(1, "test")
    gc.disable()
    try:
        body = asyncio.run(serve(pool))
        assert asyncio.run(pool.run(lambda: 1)) == 1  # the thread has ended its last job
        assert body() is None
    finally:
        gc.enable()


@pytest.mark.slow
def test_one_keys_large_bodies_do_not_keep_another_key_waiting(start: Start) -> None:
    proxy = start()
    parts = [{"type": "text", "text": "x", "extra": {str(number): {} for number in range(90_000)}}]
    heavy = json.dumps({"model": "agent", "messages": [{"role": "user", "content": parts}], "top_logprobs": 5})
    light = json.dumps({"model": "agent", "messages": [{"role": "user", "content": "x" * 300_000}]})
    answered: list[tuple[str, int]] = []

    def send(key: str, body: str) -> None:
        head = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        answer = httpx.post(f"{proxy.url}/v1/chat/completions", content=body, headers=head, timeout=120)
        answered.append((key, answer.status_code))

    with ThreadPoolExecutor(21) as clients:
        for _ in range(20):
            clients.submit(send, "a", heavy)
        time.sleep(0.3)
        clients.submit(send, "b", light)
    assert set(answered) == {("a", 400), ("b", 200)}  # `top_logprobs` is refused after the messages are read
    assert answered.index(("b", 200)) < 12
