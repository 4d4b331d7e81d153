"""Stress an environment's tools before RL begins: latency, throughput and failures, by tool and concurrency.

Training calls the tools from `num_generations` x `groups_per_round` rollouts. A tool that slows down, fails or blocks
under that load makes rewards of its own, which the policy learns.

`python -m examples.stress_tools my_agent:tools calls.jsonl --concurrency 1 16 128`: `tools` is a mapping of names to
functions, sync or async; a line of the file is {"tool": NAME, "arguments": {...}}. Fewer lines than the concurrency are
repeated. Exit code 1: a limit is exceeded.
"""

import argparse
import asyncio
import importlib
import inspect
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Tools = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call to make."""

    tool: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Measured:
    """What one tool did at one concurrency. Seconds of answered calls."""

    tool: str
    concurrency: int
    seconds: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)

    @property
    def failure_rate(self) -> float:
        """The share of calls that failed."""
        failed = self.failures.total()
        return failed / (failed + len(self.seconds))

    def quantile(self, share: float) -> float:
        """A quantile of the seconds; nan if no call was answered."""
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")

    def line(self) -> str:
        """The row of the table."""
        worst = ", ".join(f"{count} {name}" for name, count in self.failures.most_common(3))
        times = "".join(f"{1000 * self.quantile(share):10.1f}" for share in (0.5, 0.95, 0.99))
        return f"{self.tool:<20}{self.concurrency:>6}{len(self.seconds):>8}{times}{self.failure_rate:>9.1%}  {worst}"


async def stress(tools: Tools, calls: Sequence[ToolCall], concurrency: int, *, timeout: float = 30.0) -> list[Measured]:
    """Make all calls, so many at a time; return what each tool did. A slower call has failed with TimeoutError.

    Fewer calls than `concurrency` are repeated.
    """
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(concurrency))  # for tools that are not async
    found = {call.tool: Measured(call.tool, concurrency) for call in calls}
    places = asyncio.Semaphore(concurrency)

    async def run(call: ToolCall) -> None:
        async with places:
            began = time.perf_counter()
            try:
                async with asyncio.timeout(timeout):
                    await _call(tools[call.tool], call.arguments)
            except Exception as error:  # noqa: BLE001  every failure of a tool counts
                found[call.tool].failures[type(error).__name__] += 1
            else:
                found[call.tool].seconds.append(time.perf_counter() - began)

    await asyncio.gather(*map(run, list(calls) * math.ceil(concurrency / len(calls))))
    return list(found.values())


async def _call(tool: Callable[..., Any], arguments: Mapping[str, Any]) -> object:
    if inspect.iscoroutinefunction(tool):
        return await tool(**arguments)
    return await asyncio.to_thread(tool, **arguments)


def main(argv: Sequence[str]) -> int:
    """Print the table; 1 if a tool fails or slows down more than the limits allow."""
    parser = argparse.ArgumentParser()
    parser.add_argument("tools", help="module:name of the mapping")
    parser.add_argument("calls", type=Path, help="a file with a call per line")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 128])
    parser.add_argument("--max-failure-rate", type=float, default=0.01)
    parser.add_argument("--max-p99", type=float, default=5.0, help="seconds")
    given = parser.parse_args(argv)
    module, _, name = given.tools.partition(":")
    tools: Tools = getattr(importlib.import_module(module), name)
    calls = [ToolCall(**json.loads(line)) for line in given.calls.read_text().splitlines() if line]
    if not calls:
        parser.error(f"{given.calls} has no calls")
    print(f"{'tool':<20}{'conc.':>6}{'ok':>8}{'p50 ms':>10}{'p95 ms':>10}{'p99 ms':>10}{'failed':>9}")
    exceeded = False
    for concurrency in given.concurrency:
        for one in asyncio.run(stress(tools, calls, concurrency)):
            print(one.line())
            exceeded |= one.failure_rate > given.max_failure_rate or not one.quantile(0.99) <= given.max_p99
    return int(exceeded)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
