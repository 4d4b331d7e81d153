"""The report of `ratchet bench`: a table of the targets, and the latency that the proxy adds."""

from __future__ import annotations

from typing import Any

import msgspec

from ratchet.bench.latency_statistics import Overhead, Percentiles, TargetStatistics
from ratchet.bench.measurement import DIRECT, DIRECT_WITH_IDS, PROXIED, Measurement
from ratchet.output.terminal import print_table

_UNKNOWN = "unknown"


def plain(measured: Measurement) -> dict[str, Any]:
    """Return the measurement as plain data for JSON."""
    content: dict[str, Any] = msgspec.to_builtins(measured)
    return content


def show(measured: Measurement) -> None:
    """Print the table and its explanation."""
    from rich.table import Table

    table = Table()
    table.add_column("")
    for way in measured.ways:
        table.add_column(way.name, justify="right")
    for name, *cells in zip(*[("calls, failed", *_ROWS), *(_cells(way) for way in measured.ways)], strict=True):
        table.add_row(name, *cells)
    print_table(table, lines(measured))


_ROWS = (
    "first byte ms: p50, p95, p99", "whole call ms: p50, p95, p99", "calls/s", "tokens/s", "proxy says of itself, ms",
    "proxy CPU, us per call",
)  # fmt: skip


def _cells(way: TargetStatistics) -> list[str]:
    proxied = way.name == PROXIED
    return [
        f"{way.calls}, {way.failed}", _times(way.first_byte), _times(way.whole), f"{way.calls_per_second:.2f}",
        f"{way.tokens_per_second:.1f}", _times(way.overhead) if proxied else "",
        (f"{way.cpu_us:.0f}" if way.cpu_us is not None else _UNKNOWN) if proxied else "",
    ]  # fmt: skip


def _times(found: Percentiles | None) -> str:
    return f"{found.p50:.1f}  {found.p95:.1f}  {found.p99:.1f}" if found else _UNKNOWN


def lines(measured: Measurement) -> list[str]:
    """Return the lines below the table: overheads, failures and warnings."""
    text = [_format_overhead(one) for one in measured.added]
    for way in measured.ways:
        if way.failed:
            text.append(f"{way.name}: {way.failed} of {way.calls} calls failed: {way.commonest_failure}")
        if way.name == PROXIED and way.cpu_us is None:
            text.append("the proxy's CPU is unknown: its process cannot be seen from here (another machine, or user)")
    if measured.client_was_busy:
        text.append(
            "the benchmark client used most of its CPU core: reduce --concurrency, or run it on another machine"
        )
    return text


_MEANS = {
    (PROXIED, DIRECT): "the proxy and all it asks for add",
    (DIRECT_WITH_IDS, DIRECT): "  of that, vLLM for ids and logprobs",
    (PROXIED, DIRECT_WITH_IDS): "  of that, the proxy itself",
}


def _format_overhead(one: Overhead) -> str:
    known = one.low is not None and one.high is not None
    reach = f"95% {one.low:+.2f} to {one.high:+.2f}" if known else "too few turns for an interval"
    return f"{_MEANS[one.way, one.to]}: {one.value:+.2f} ms to the {one.what} ({reach}, {one.turns} turns)"
