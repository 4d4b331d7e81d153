"""Measures three targets in turns: vLLM directly, vLLM with the proxy's request options, and the proxy.

    direct                    the request of an agent
    direct, ids and logprobs  the same with token ids and logprobs, as the proxy requests them: their cost in vLLM
    through the proxy         the difference to the line above is the proxy's own overhead

Guarantees: each target is first equally often; the warm-up is not counted; the measurement fails with the reason if
every warm-up call of a target fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import uvloop

from ratchet.bench.latency_statistics import Overhead, TargetStatistics, added, figures
from ratchet.bench.timed_calls import CallBlock, CallTarget, RequestShape, block
from ratchet.errors import BenchmarkFailed
from ratchet.proxy.upstreams.http_client import HttpClient
from ratchet.proxy.upstreams.http_connection import ResponseLimits

DIRECT, DIRECT_WITH_IDS, PROXIED = "direct", "direct, ids and logprobs", "through the proxy"
IDS: dict[str, Any] = {"return_token_ids": True, "logprobs": True, "top_logprobs": 0}
_COMPARED = ((PROXIED, DIRECT), (DIRECT_WITH_IDS, DIRECT), (PROXIED, DIRECT_WITH_IDS))
_CONNECT = 10.0  # seconds
_LARGEST_ANSWER = 2**28  # bytes
_BUSY = 0.8  # share of a core; above it the client itself may be the bottleneck

OnProgress = Callable[[str, int, int], None]


class MeasurementPlan(msgspec.Struct, frozen=True):
    """Calls per target, concurrent calls, turns, and the timeout of a call in seconds."""

    calls: int
    concurrency: int
    turns: int
    timeout: float


class Measurement(msgspec.Struct, frozen=True):
    """The results."""

    plan: MeasurementPlan
    ways: tuple[TargetStatistics, ...]
    added: tuple[Overhead, ...]

    @property
    def failed(self) -> int:
        """The number of failed calls."""
        return sum(way.failed for way in self.ways)

    @property
    def client_was_busy(self) -> bool:
        """Whether the client used so much of its CPU core that it may have distorted the result."""
        return any(way.client_cpu_share > _BUSY for way in self.ways)


def measure(
    ways: Sequence[CallTarget],
    shape: RequestShape,
    plan: MeasurementPlan,
    cpu: Callable[[], float] | None,
    report_progress: OnProgress = lambda *_: None,
) -> Measurement:
    """Measure the targets; `cpu` returns the CPU seconds of the proxy so far. Raises BenchmarkFailed."""
    return uvloop.run(_measure(ways, shape, plan, cpu, report_progress))


async def _measure(
    ways: Sequence[CallTarget],
    shape: RequestShape,
    plan: MeasurementPlan,
    cpu: Callable[[], float] | None,
    report_progress: OnProgress,
) -> Measurement:
    client = HttpClient(ResponseLimits(plan.timeout, plan.timeout, _LARGEST_ANSWER), _CONNECT)
    blocks: dict[str, list[CallBlock]] = {way.name: [] for way in ways}
    size = max(1, plan.calls // plan.turns)
    try:
        for way in ways:
            await _warm_up(client, way, shape, plan.concurrency)
        for turn in range(plan.turns):
            first = turn % len(ways)
            for way in (*ways[first:], *ways[:first]):
                used = cpu if way.name == PROXIED else None
                blocks[way.name].append(await block(client, way, shape, size, plan.concurrency, used))
                report_progress("measuring", 1, plan.turns * len(ways))
    finally:
        client.close()
        await asyncio.sleep(0)  # let the connections handle their closing
    pairs = [(one, other) for one, other in _COMPARED if one in blocks and other in blocks]
    metrics = ("first byte", "whole call") if shape.stream else ("whole call",)
    gains = (added(one, other, what, blocks[one], blocks[other]) for one, other in pairs for what in metrics)
    found = tuple(figures(way.name, blocks[way.name]) for way in ways)
    return Measurement(plan, found, tuple(gain for gain in gains if gain is not None))


async def _warm_up(client: HttpClient, way: CallTarget, shape: RequestShape, concurrency: int) -> None:
    tried = await block(client, way, shape, concurrency, concurrency)
    failures = [call.failure for call in tried.calls if call.failure is not None]
    if len(failures) == len(tried.calls):
        raise BenchmarkFailed(f"{way.name} ({way.url}, model {way.model}): no call succeeds: {failures[0]}")
