"""Latency statistics: percentiles of each target, and the latency that one target adds to another. Pure.

A turn is one block of calls to each target, one after the other. Drift over time (other load, a warm cache) affects
all targets alike, so only differences within a turn are used. The interval of their median comes from order statistics
(as in the sign test), without an assumed distribution. It needs six turns.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from ratchet.bench.timed_calls import CallBlock, TimedCall

_ERROR = 0.05  # chance that an interval misses


class Percentiles(msgspec.Struct, frozen=True):
    """Milliseconds."""

    p50: float
    p95: float
    p99: float


class TargetStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of one target. Percentiles are None if no call succeeded."""

    name: str
    calls: int
    failed: int
    commonest_failure: str | None
    first_byte: Percentiles | None
    whole: Percentiles | None
    calls_per_second: float
    tokens_per_second: float
    overhead: Percentiles | None  # reported by the proxy in x-ratchet-overhead-ms
    cpu_us: float | None  # microseconds of the proxy's process per call
    client_cpu_share: float  # share of one core that the benchmark client used


class Overhead(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds that one target adds to another: the median over turns, with its 95% interval."""

    way: str
    to: str
    what: str
    value: float
    low: float | None
    high: float | None
    turns: int


def figures(name: str, blocks: Sequence[CallBlock]) -> TargetStatistics:
    """Return the statistics of one target."""
    calls = [call for block in blocks for call in block.calls]
    good = [call for call in calls if call.failure is None]
    failures = Counter(call.failure for call in calls if call.failure is not None)
    seconds = sum(block.seconds for block in blocks) or math.inf
    known = [block.proxy_cpu for block in blocks if block.proxy_cpu is not None]
    return TargetStatistics(
        name=name, calls=len(calls), failed=len(calls) - len(good),
        commonest_failure=failures.most_common(1)[0][0] if failures else None,
        first_byte=times([call.first for call in good]), whole=times([call.whole for call in good]),
        calls_per_second=len(good) / seconds, tokens_per_second=sum(call.tokens for call in good) / seconds,
        overhead=times([call.overhead for call in good if call.overhead is not None]),
        cpu_us=sum(known) / len(calls) * 1e6 if known and calls else None,
        client_cpu_share=sum(block.own_cpu for block in blocks) / seconds,
    )  # fmt: skip


def times(seconds: Sequence[float]) -> Percentiles | None:
    """Return percentiles in milliseconds (nearest rank); None without values."""
    if not seconds:
        return None
    order = sorted(seconds)
    return Percentiles(*(1000 * order[max(0, math.ceil(share * len(order)) - 1)] for share in (0.5, 0.95, 0.99)))


def added(way: str, to: str, what: str, ours: Sequence[CallBlock], theirs: Sequence[CallBlock]) -> Overhead | None:
    """Return what a target adds to the median of `what` ("first byte" or "whole call").

    None if no turn has a successful call on both sides.
    """
    pick: Callable[[TimedCall], float] = (
        (lambda call: call.first) if what == "first byte" else (lambda call: call.whole)
    )
    differences = []
    for one, other in zip(ours, theirs, strict=True):
        sides = [[pick(call) for call in block.calls if call.failure is None] for block in (one, other)]
        if all(sides):
            differences.append(1000 * (statistics.median(sides[0]) - statistics.median(sides[1])))
    if not differences:
        return None
    low, high = interval(differences)
    value = statistics.median(differences)
    return Overhead(way=way, to=to, what=what, value=value, low=low, high=high, turns=len(differences))


def interval(values: Sequence[float]) -> tuple[float, float] | tuple[None, None]:
    """Return an interval that contains the median with at least 95% confidence; (None, None) for too few values."""
    count, order = len(values), sorted(values)
    outside, below = 0, 0.0  # ranks left out on each side, and the chance that the median lies there
    while (below := below + math.comb(count, outside) / 2**count) <= _ERROR / 2:
        outside += 1
    return (order[outside - 1], order[count - outside]) if outside else (None, None)
