"""What a call through the proxy costs: its CPU per call and per streamed chunk, and the latency that it adds.

A scripted vLLM, the proxy (capture on, durable) and the load run in processes of their own; calls go straight to the
scripted vLLM and through the proxy in turns within one run, so that the machine's mood falls on both. CPU is the
proxy process's own user and system time, divided by the calls.

    python -m benchmarks.proxy_overhead [--calls 2000] [--concurrency 8] [--chunks 64] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from tests.proxy.servers import ROOT, ProxyProcess, eventually

PROMPT = "Find the message about the budget of the spring meeting. " * 60  # 3.5 KB


@dataclass(frozen=True)
class Cost:
    """One kind of call: latencies in ms, straight and through the proxy; CPU of the proxy in microseconds per call."""

    kind: str
    straight_p50: float
    proxy_p50: float
    straight_p99: float
    proxy_p99: float
    cpu_us: float
    added_p50: float
    added_p99: float


async def one(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> float:
    """Make one call; return its seconds."""
    began = time.perf_counter()
    async with session.post(url + "/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()
    return time.perf_counter() - began


async def many(url: str, body: dict[str, Any], calls: int, concurrency: int) -> list[float]:
    """Make `calls` calls, `concurrency` at a time; return their seconds."""
    seconds: list[float] = []
    left = iter(range(calls))

    async def worker(session: aiohttp.ClientSession) -> None:
        for _ in left:  # shared: a call is made by whoever is free
            took = await one(session, url, body)
            seconds.append(took)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(worker(session) for _ in range(concurrency)))
    return seconds


def measure(kind: str, straight: str, proxy: ProxyProcess, body: dict[str, Any], calls: int, concurrency: int) -> Cost:
    """Alternate between the two ways in ten rounds."""
    process = psutil.Process(proxy.pid)
    asyncio.run(many(straight, {**body, "model": "tiny-base"}, 50, concurrency))
    asyncio.run(many(proxy.url, body, 50, concurrency))
    direct: list[float] = []
    through: list[float] = []
    cpu = 0.0
    asked = {**body, "model": "tiny-base", "return_token_ids": True, "logprobs": True, "top_logprobs": 0}
    for _ in range(10):
        direct += asyncio.run(many(straight, asked, calls // 10, concurrency))
        before = process.cpu_times()
        through += asyncio.run(many(proxy.url, body, calls // 10, concurrency))
        after = process.cpu_times()
        cpu += after.user + after.system - before.user - before.system
    a, b = cuts(direct), cuts(through)
    return Cost(kind, a[0], b[0], a[1], b[1], 1e6 * cpu / len(through), b[0] - a[0], b[1] - a[1])


def cuts(seconds: Sequence[float]) -> tuple[float, float]:
    """Return p50 and p99 in milliseconds."""
    parts = statistics.quantiles(seconds, n=100)
    return 1000 * parts[49], 1000 * parts[98]


def free_port() -> int:
    """Return a port that nobody holds now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def run(calls: int, concurrency: int, chunks: int) -> list[Cost]:
    """Start the servers, measure, stop them."""
    port = free_port()
    upstream = subprocess.Popen([sys.executable, "-m", "tests.proxy.scripted_vllm", str(port)], cwd=ROOT)
    url = f"http://127.0.0.1:{port}"
    try:
        with tempfile.TemporaryDirectory() as folder:
            proxy = ProxyProcess(Path(folder), upstreams=[url])
            try:
                eventually(lambda: _answers(f"{proxy.url}/health/ready"), 15)
                text = [{"role": "user", "content": f"{PROMPT} #tokens={chunks}"}]
                plain: dict[str, Any] = {"model": "agent", "messages": text}
                return [
                    measure("plain, one at a time", url, proxy, plain, calls, 1),
                    measure(f"plain, {concurrency} at a time", url, proxy, plain, calls, concurrency),
                    measure(
                        f"stream of {chunks} chunks", url, proxy, {**plain, "stream": True}, calls // 4, concurrency
                    ),
                ]
            finally:
                proxy.stop()
    finally:
        upstream.terminate()
        upstream.wait()


def _answers(url: str) -> bool:
    import httpx

    return httpx.get(url).status_code == 200


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    costs = run(options.calls, options.concurrency, options.chunks)
    if options.json:
        print(json.dumps([{name: getattr(cost, name) for name in Cost.__dataclass_fields__} for cost in costs]))
        return
    print(f"{'':24} {'straight p50, p99':>18} {'proxy p50, p99':>18} {'added p50, p99 ms':>18} {'proxy CPU us':>13}")
    for cost in costs:
        pairs = (
            (cost.straight_p50, cost.straight_p99),
            (cost.proxy_p50, cost.proxy_p99),
            (cost.added_p50, cost.added_p99),
        )
        print(f"{cost.kind:24} " + " ".join(f"{a:9.2f} {b:8.2f}" for a, b in pairs) + f" {cost.cpu_us:13.0f}")
    stream = costs[-1]
    print(f"per streamed chunk: {(stream.cpu_us - costs[1].cpu_us) / options.chunks:.1f} us of proxy CPU")


if __name__ == "__main__":
    main()
