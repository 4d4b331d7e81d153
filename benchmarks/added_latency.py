"""The latency that a running proxy adds to the calls of your own vLLM.

Three targets are called in turns, so that drift (other load, a warm cache) affects them alike:

    direct                    the request of an agent
    direct, ids and logprobs  the same with token ids and logprobs, as the proxy requests them: their cost in vLLM
    through the proxy         the difference to the line above is the proxy's own

Differences are taken within a turn; the 95% interval of their median comes from order statistics, as in the sign test,
and needs six turns. Prompts differ from the first word on, so that no prefix cache hits. The calls name the live
version: they are neither judged nor trained, and are recorded with the tag `bench`. Run it while vLLM is idle. Exit
code 1: a call failed. Keys: RATCHET_API_KEYS, RATCHET_UPSTREAM_API_KEY.

    python -m benchmarks.added_latency --model mail [--proxy URL] [--upstream URL] [--concurrency 32] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil

from ratchet.supervisor import services

DIRECT, WITH_IDS, PROXIED = "direct", "direct, ids and logprobs", "through the proxy"
_COMPARED = {
    (PROXIED, DIRECT): "the proxy and all it asks for add",
    (WITH_IDS, DIRECT): "  of that, vLLM for ids and logprobs",
    (PROXIED, WITH_IDS): "  of that, the proxy itself",
}
_WORDS = ("find", "the", "mail", "about", "a", "budget", "of", "spring", "and", "say", "who", "sent", "it", "when")
_USAGE = re.compile(rb'"completion_tokens"\s*:\s*(\d+)')


@dataclass(frozen=True)
class CallTarget:
    """A server, its name of the model, its key, and additional fields of the body."""

    name: str
    url: str
    model: str
    key: str | None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TimedCall:
    """Seconds to the first and the last byte, or why the call failed; `overhead` as the proxy reports it."""

    first: float = 0.0
    whole: float = 0.0
    tokens: int = 0
    overhead: float | None = None
    failure: str | None = None


@dataclass(frozen=True)
class CallBlock:
    """Concurrent calls of one target, their wall time, and the proxy's CPU seconds."""

    calls: list[TimedCall]
    seconds: float
    cpu: float


class Measurement:
    """Calls of one shape to the targets, in turns."""

    def __init__(self, chosen: argparse.Namespace, web: aiohttp.ClientSession, cpu: Callable[[], float] | None) -> None:
        self._chosen, self._web, self._cpu = chosen, web, cpu
        self._numbers = itertools.count()

    async def run(self, targets: Sequence[CallTarget]) -> dict[str, list[CallBlock]]:
        """Return the blocks of each target. Ends the program if no call of a target's warm-up succeeds."""
        chosen = self._chosen
        for target in targets:
            tried = (await self._block(target, chosen.concurrency)).calls
            if all(call.failure for call in tried):
                sys.exit(f"{target.name} ({target.url}, model {target.model}): no call succeeds: {tried[0].failure}")
        blocks: dict[str, list[CallBlock]] = {target.name: [] for target in targets}
        for turn in range(chosen.blocks):
            first = turn % len(targets)
            for target in (*targets[first:], *targets[:first]):
                blocks[target.name].append(await self._block(target, max(1, chosen.calls // chosen.blocks)))
        return blocks

    async def _block(self, target: CallTarget, count: int) -> CallBlock:
        left, calls = iter(range(count)), list[TimedCall]()

        async def work() -> None:
            for _ in left:
                calls.append(await self._call(target))

        used, began = self._cpu() if self._cpu else 0.0, time.perf_counter()
        await asyncio.gather(*(work() for _ in range(min(self._chosen.concurrency, count))))
        return CallBlock(calls, time.perf_counter() - began, (self._cpu() if self._cpu else 0.0) - used)

    async def _call(self, target: CallTarget) -> TimedCall:
        began, first, content = time.perf_counter(), 0.0, b""
        try:
            async with self._web.post(
                f"{target.url}/v1/chat/completions", json=self._body(target), headers=_headers(target.key)
            ) as answer:
                async for piece in answer.content.iter_any():
                    first = first or time.perf_counter() - began
                    content += piece
        except (aiohttp.ClientError, TimeoutError) as error:
            return TimedCall(failure=f"{type(error).__name__}: {error}")
        whole = time.perf_counter() - began
        if answer.status != 200 or b'{"error"' in content:  # text of the model would be escaped
            return TimedCall(failure=f"{answer.status}: {content[:300].decode('utf-8', 'replace')}")
        tokens, overhead = _USAGE.findall(content), answer.headers.get("x-ratchet-overhead-ms")
        return TimedCall(first, whole, int(tokens[-1]) if tokens else 0, float(overhead) / 1000 if overhead else None)

    def _body(self, target: CallTarget) -> dict[str, Any]:
        text = " ".join(itertools.islice(itertools.cycle(_WORDS), self._chosen.prompt_words))
        prompt = f"{time.time_ns() % 10**9:09d}{next(self._numbers):06d} {text}"
        streamed = {"stream": True, "stream_options": {"include_usage": True}} if self._chosen.stream else {}
        return {
            "model": target.model, "messages": [{"role": "user", "content": prompt}], "temperature": 1.0,
            "max_tokens": self._chosen.max_tokens, "ignore_eos": True, **streamed, **target.extra,
        }  # fmt: skip


def figures(name: str, blocks: Sequence[CallBlock]) -> dict[str, Any]:
    """Return the figures of one target; percentiles in milliseconds."""
    calls = [call for block in blocks for call in block.calls]
    good = [call for call in calls if call.failure is None]
    failures = Counter(call.failure for call in calls if call.failure is not None)
    seconds = sum(block.seconds for block in blocks)
    cpu = sum(block.cpu for block in blocks)
    return {
        "name": name,
        "calls": len(calls),
        "failed": len(calls) - len(good),
        "commonest_failure": failures.most_common(1)[0][0] if failures else None,
        "first_byte": percentiles([call.first for call in good]),
        "whole": percentiles([call.whole for call in good]),
        "tokens_per_second": sum(call.tokens for call in good) / seconds,
        "overhead": percentiles([call.overhead for call in good if call.overhead is not None]),
        "cpu_us": 1e6 * cpu / len(calls) if cpu and name == PROXIED else None,
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Return milliseconds (nearest rank); None without values."""
    order = sorted(seconds)
    ranks = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
    return {name: 1000 * order[math.ceil(share * len(order)) - 1] for name, share in ranks.items()} if order else None


def added(one: str, other: str, what: str, blocks: dict[str, list[CallBlock]]) -> dict[str, Any] | None:
    """Return the milliseconds that a target adds to the median of `what` ("first" or "whole"), None without a turn."""
    differences = []
    for ours, theirs in zip(blocks[one], blocks[other], strict=True):
        sides = [[getattr(call, what) for call in block.calls if call.failure is None] for block in (ours, theirs)]
        if all(sides):
            differences.append(1000 * (median(sides[0]) - median(sides[1])))
    if not differences:
        return None
    low, high = interval(differences)
    value, turns = median(differences), len(differences)
    return {"target": one, "to": other, "what": what, "value": value, "low": low, "high": high, "turns": turns}


def interval(values: Sequence[float]) -> tuple[float, float] | tuple[None, None]:
    """Return an interval that contains the median with at least 95% confidence; (None, None) for too few values."""
    count, order = len(values), sorted(values)
    outside, below = 0, 0.0  # ranks left out on each side, and the chance that the median lies there
    while (below := below + math.comb(count, outside) / 2**count) <= 0.025:
        outside += 1
    return (order[outside - 1], order[count - outside]) if outside else (None, None)


async def targets_of(chosen: argparse.Namespace, web: aiohttp.ClientSession) -> list[CallTarget]:
    """Return the targets. Ends the program if a server does not list the model."""
    key, vllm_key = os.environ.get("RATCHET_API_KEYS", "").split(",")[0], os.environ.get("RATCHET_UPSTREAM_API_KEY")
    known = await _models(web, chosen.proxy, key, "--proxy")
    if chosen.model not in {card["id"] for card in known}:
        sys.exit(f"--model {chosen.model}: the proxy knows {', '.join(card['id'] for card in known)}")
    live = (card["id"] for card in known if card.get("parent") == chosen.model and card.get("state") == "live")
    version = next(live, chosen.model)
    name = chosen.upstream_model
    if name is None:
        served = await _models(web, chosen.upstream, vllm_key, "--upstream")
        bases = [card["id"] for card in served if not card.get("parent")]
        candidates = [card["id"] for card in served if card["id"] == version] or bases * version.endswith("@0")
        if not candidates:
            sys.exit(f"vLLM does not serve {version}: name one of its models with --upstream-model")
        name = candidates[0]
    ids = {"return_token_ids": True, "logprobs": True, "top_logprobs": 0}
    return [
        CallTarget(DIRECT, chosen.upstream, name, vllm_key),
        CallTarget(WITH_IDS, chosen.upstream, name, vllm_key, ids),
        CallTarget(PROXIED, chosen.proxy, version, key),
    ]


async def _models(web: aiohttp.ClientSession, url: str, key: str | None, option: str) -> list[dict[str, Any]]:
    try:
        async with web.get(f"{url}/v1/models", headers=_headers(key), raise_for_status=True) as answer:
            return list((await answer.json())["data"])
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        sys.exit(f"{option} {url} does not list its models: {type(error).__name__}: {error}")


def _headers(key: str | None) -> dict[str, str]:
    return {"x-ratchet-tags": "bench"} | ({"authorization": f"Bearer {key}"} if key else {})


def cpu_seconds_of(url: str) -> Callable[[], float] | None:
    """Return a function for the CPU seconds of the process that listens at a local URL; None if it is not seen."""
    parts = urlsplit(url)
    owner = services.port_holder(parts.port or 80) if parts.hostname in ("127.0.0.1", "::1", "localhost") else None
    return (lambda: sum(psutil.Process(owner[0]).cpu_times()[:2])) if owner else None


def show(result: dict[str, Any]) -> None:
    """Print the figures of each target, and what is added."""
    for row in result["targets"]:
        print(f"{row['name']}: {row['calls']} calls, {row['failed']} failed, {row['tokens_per_second']:.1f} tokens/s")
        for name in ("first_byte", "whole", "overhead"):
            if times := row[name]:
                print(f"  {name:<10} " + "  ".join(f"{rank} {value:8.1f} ms" for rank, value in times.items()))
        if row["commonest_failure"]:
            print(f"  commonest failure: {row['commonest_failure']}")
        if row["cpu_us"]:
            print(f"  the proxy's CPU: {row['cpu_us']:.0f} us a call")
    for one in result["added"]:
        known = one["low"] is not None
        reach = f"95% {one['low']:+.2f} to {one['high']:+.2f}" if known else "too few turns for an interval"
        print(f"{_COMPARED[one['target'], one['to']]}: {one['value']:+.2f} ms to the {one['what']} ({reach})")


async def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    """Return what was measured, as plain data."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(chosen.timeout)) as web:
        targets = await targets_of(chosen, web)
        blocks = await Measurement(chosen, web, cpu_seconds_of(chosen.proxy)).run(targets)
    metrics = ("first", "whole") if chosen.stream else ("whole",)
    found = [added(*pair, what, blocks) for pair in _COMPARED for what in metrics]
    return {
        "targets": [{"url": target.url, "model": target.model} | figures(target.name, blocks[target.name])
                    for target in targets],
        "added": [one for one in found if one is not None],
    }  # fmt: skip


def main() -> int:
    """Measure and print. Returns 1 if a call failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the agent")
    parser.add_argument("--proxy", default="http://127.0.0.1:8000")
    parser.add_argument("--upstream", default="http://127.0.0.1:8001", help="vLLM behind the proxy")
    parser.add_argument("--upstream-model", help="vLLM's name of the model (default: detected)")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=10, help="turns")
    parser.add_argument("--calls", type=int, help="per target (default: 2 x concurrency x blocks)")
    parser.add_argument("--stream", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--prompt-words", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=64, help="of every answer, exactly")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds, of a call")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    chosen.calls = chosen.calls or 2 * chosen.concurrency * chosen.blocks
    for name in ("proxy", "upstream"):
        setattr(chosen, name, getattr(chosen, name).rstrip("/").removesuffix("/v1"))
    result = asyncio.run(measure(chosen))
    print(json.dumps(result)) if chosen.json else show(result)
    return int(any(row["failed"] for row in result["targets"]))


if __name__ == "__main__":
    sys.exit(main())
