"""The proxy's memory: bounded caches, and memory returned to the system."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from ratchet.proxy.worker.call.recorder import DurableMessages
from tests.harness.proxy.servers import ProxyProcess, eventually

BODY: Any = {"model": "agent", "messages": [{"role": "user", "content": "hi"}]}


def answers(url: str) -> bool:
    try:
        return httpx.get(url + "/health/ready", timeout=5).status_code == 200
    except httpx.TimeoutException:  # a busy machine
        return False


@pytest.mark.slow
def test_memory_of_large_bodies_is_returned_to_the_system(vllm_url: str, tmp_path: Path) -> None:
    process = ProxyProcess(tmp_path, upstreams=[vllm_url])
    eventually(partial(answers, process.url))
    large = b'{"model":"agent","messages":[{"role":"user","content":"' + b"x" * (7 * 2**20) + b'"}] no JSON'
    with httpx.Client(base_url=process.url, timeout=60) as client, ThreadPoolExecutor(3) as pool:
        url = "/v1/chat/completions"
        assert client.post(url, json=BODY).status_code == 200
        before = psutil.Process(process.pid).memory_info().rss
        for _ in range(8):
            others = [pool.submit(client.post, url, content=large) for _ in range(3)]
            assert client.post(url, json=BODY).status_code == 200
            assert {other.result().status_code for other in others} == {400}
        # Twice that if freed blocks are kept; the proxy may be late on a busy machine.
        eventually(lambda: psutil.Process(process.pid).memory_info().rss - before < 16 * 2**20)
    assert process.stop() == 0


@pytest.mark.parametrize("half", [10, 1000])
def test_hashes_of_durable_messages_are_bounded_and_the_oldest_are_dropped(half: int) -> None:
    durable = DurableMessages(half)
    for number in range(5000):
        durable.add([f"hash_{number}", "again"])
    kept = [number for number in range(5000) if f"hash_{number}" in durable]
    assert half <= len(kept) + 1 <= 2 * half
    assert kept == list(range(kept[0], 5000))
    assert "again" in durable
    durable.clear()
    assert "again" not in durable
