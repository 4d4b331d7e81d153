"""Counts the end of each call: how it ended, how long it took, its tokens, and how it was linked.

Prometheus' children are looked up once per combination of labels; after that a call costs a few microseconds. All
labels come from small sets: aliases that are served, dialects, states, purposes, kinds of links and contexts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ratchet.proxy.telemetry.call_timing import CallTiming
from ratchet.proxy.telemetry.metrics import Metrics
from ratchet.store.records import CallEnded

_REASONS = (
    "no_token_ids",
    "no_logprobs",
    "no_prompt_token_ids",
    "no_answer",
    "redacted",
    "other_model",
    "echo",
    "image",
    "beam_search",
    "failed",
)

_Count = Callable[[float], None]


class _Series(NamedTuple):
    """What a call with one combination of labels adds to."""

    calls: _Count
    links: _Count
    prompt: _Count
    completion: _Count
    context: _Count
    seconds: _Count
    first_token: _Count
    inter_token: _Count


class CallCounters:
    """The counters of ended calls."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._overhead = metrics.overhead_seconds.observe
        self._series: dict[tuple[str, str, str, str, str, str], _Series] = {}

    def count(self, record: CallEnded, timing: CallTiming, failure: str | None) -> None:
        """Count one call; `failure` is its class of error."""
        begun = record.begun
        context = "untrainable" if record.untrainable else record.context
        key = (begun.alias, begun.dialect, record.state, begun.purpose, begun.linked_by, context)
        series = self._series.get(key) or self._look_up(key)
        series.calls(1)
        series.links(1)
        series.prompt(record.prompt_tokens)
        series.completion(record.completion_tokens)
        series.context(record.completion_tokens)
        series.seconds(timing.total)
        if timing.overhead is not None:
            self._overhead(timing.overhead)
        if begun.streamed and timing.first_byte is not None:
            series.first_token(timing.first_byte)
            if timing.inter_token is not None:
                series.inter_token(timing.inter_token)
        if failure:
            self._metrics.errors.labels(failure).inc()
        if record.untrainable:
            self._metrics.untrainable.labels(record.untrainable if record.untrainable in _REASONS else "other").inc()

    def _look_up(self, key: tuple[str, str, str, str, str, str]) -> _Series:
        alias, dialect, state, purpose, linked_by, context = key
        metrics = self._metrics
        found = self._series[key] = _Series(
            calls=metrics.calls.labels(alias, dialect, state, purpose).inc,
            links=metrics.links.labels(linked_by).inc,
            prompt=metrics.tokens.labels(alias, "prompt", purpose).inc,
            completion=metrics.tokens.labels(alias, "completion", purpose).inc,
            context=metrics.context_tokens.labels(context).inc,
            seconds=metrics.call_seconds.labels(alias).observe,
            first_token=metrics.first_token_seconds.labels(alias).observe,
            inter_token=metrics.inter_token_seconds.labels(alias).observe,
        )
        return found
