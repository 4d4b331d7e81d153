"""Counts tool calls for Prometheus, with a bounded number of names: clients choose what their tools are called."""

from __future__ import annotations

from collections.abc import Iterable

from ratchet.proxy.coordinator.tool_checks.checker import ToolCallCount
from ratchet.proxy.telemetry.metrics import ProxyMetrics

OTHER = "other"
_MOST_NAMES = 100
_LONGEST_NAME = 64


class ToolCallCounters:
    """The counters. The first hundred names are shown, all later ones are `other`."""

    def __init__(self, metrics: ProxyMetrics) -> None:
        self._metrics = metrics
        self._names: set[str] = set()

    def count(self, counts: Iterable[ToolCallCount]) -> None:
        """Add what became known."""
        for one in counts:
            name = self._shown(one.tool[:_LONGEST_NAME])
            if one.outcome is not None:
                self._metrics.tool_calls.labels(name, one.outcome).inc(one.count)
            if one.result is not None:
                self._metrics.tool_results.labels(name, one.result).inc(one.count)

    def _shown(self, name: str) -> str:
        if name not in self._names:
            if len(self._names) >= _MOST_NAMES:
                return OTHER
            self._names.add(name)
        return name
