"""Throughput of a vLLM with adapters, and adapters loaded under load.

    python -m benchmarks.gpu.served_load URL ADAPTERS [--scale 8]

ADAPTERS is a folder of adapter folders; two of them are used. Calls are completions of 64 prompt ids and 128 tokens at
temperature 1 with logprobs and ids, as the proxy asks for them. Prints one line of JSON a figure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

import httpx

TOKENS = 128


class Server:
    """A vLLM server, with its adapters by name."""

    def __init__(self, url: str, tokens: int) -> None:
        self._url = url
        self._tokens = tokens
        self._client = httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=300))

    async def call(self, model: str, seed: int) -> tuple[int, float, str]:
        """Return status, seconds and the body of an error."""
        body = {
            "model": model, "prompt": [(seed * 37 + place) % 400 + 20 for place in range(64)],
            "max_tokens": self._tokens, "ignore_eos": True, "temperature": 1.0, "logprobs": 0,
            "return_token_ids": True,
        }  # fmt: skip
        began = time.perf_counter()
        answer = await self._client.post(f"{self._url}/v1/completions", json=body)
        return answer.status_code, time.perf_counter() - began, "" if answer.status_code == 200 else answer.text[:200]

    async def load(self, name: str, folder: Path) -> float:
        """Load an adapter; return the milliseconds."""
        began = time.perf_counter()
        body = {"lora_name": name, "lora_path": str(folder)}
        answer = await self._client.post(f"{self._url}/v1/load_lora_adapter", json=body)
        if answer.status_code != 200:
            raise RuntimeError(f"loading {folder}: {answer.status_code} {answer.text[:300]}")
        return 1e3 * (time.perf_counter() - began)

    async def calls(self, models: list[str], at_once: int, count: int) -> dict[str, Any]:
        """Return the figures of `count` calls that take turns over the models."""
        gate, began = asyncio.Semaphore(at_once), time.perf_counter()

        async def one(number: int) -> tuple[int, float, str]:
            async with gate:
                return await self.call(models[number % len(models)], number)

        done = await asyncio.gather(*(one(number) for number in range(count)))
        spent, bad = time.perf_counter() - began, [text for status, _, text in done if status != 200]
        return {
            "models": len(models), "adapters": sum(model != "base@0" for model in models), "calls": count,
            "at_once": at_once, "tokens_per_second": self._tokens * (count - len(bad)) / spent,
            "p50_seconds": statistics.median(seconds for _, seconds, _ in done),
            "failed": len(bad), "first_error": bad[:1],
        }  # fmt: skip


async def measure(url: str, adapters: Path, scale: int, tokens: int) -> None:
    """Print the figures."""
    server = Server(url, tokens)
    one, two = sorted(folder for folder in adapters.iterdir() if folder.is_dir())[:2]
    await server.call("base@0", 0)
    loads = [await server.load(f"load@{number}", folder) for number, folder in ((1, one), (2, two))]
    report("load", milliseconds=loads)
    await server.calls(["load@1"], scale, scale)  # untimed
    for models in (["base@0"], ["load@1"], ["base@0", "load@1", "load@2"]):
        report("throughput", **await server.calls(models, 16 * scale, 32 * scale))

    async def swaps() -> list[float]:
        spent = []
        for turn in range(20):
            await asyncio.sleep(0.1)
            spent.append(await server.load(f"swap@{turn}", (one, two)[turn % 2]))
        return spent

    under_load, spent = await asyncio.gather(server.calls(["load@1", "load@2"], 16 * scale, 64 * scale), swaps())
    report("20 loads under load", median_ms=statistics.median(spent), largest_ms=max(spent), **under_load)


def report(what: str, **figures: Any) -> None:
    print(json.dumps({"served": what, **figures}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("url")
    parser.add_argument("adapters", type=Path)
    parser.add_argument("--scale", type=int, default=8, help="16 times as many calls at once")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    given = parser.parse_args()
    asyncio.run(measure(given.url, given.adapters, given.scale, given.tokens))


if __name__ == "__main__":
    main()
