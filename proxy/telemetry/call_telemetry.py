"""Metrics and the log line of a call's end: how it ended, how long it took, its tokens, how it was linked.

`CallCounters` looks up the Prometheus children once per combination of labels; after that a call costs a few
microseconds. All labels come from small sets: served aliases, dialects, states, purposes, kinds of links, contexts.

`log_call` writes one line per call to the logger `ratchet.calls`, level INFO, in logfmt; `logs.py` turns it into JSON
if configured. It contains no content and no key. What waits to be written are the line's values, not the call's
record with its messages: memory that is freed at once is still in the processor's caches for the next call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

from ratchet.proxy.telemetry.logs import FIELDS
from ratchet.proxy.telemetry.metrics import ProxyMetrics
from ratchet.store.ids import owner
from ratchet.store.records import CallEnded

log = logging.getLogger("ratchet.calls")

_REASONS = (
    "no_token_ids",
    "no_logprobs",
    "invalid_logprobs",
    "length_mismatch",
    "no_prompt_token_ids",
    "no_answer",
    "redacted",
    "other_model",
    "echo",
    "image",
    "beam_search",
    "failed",
    "refused",
)
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._:~@+/-[]")

_MAX_KEYS = 100  # labels; all later keys are `other`
_NO_KEY = "none"
_OTHER_KEYS = "other"

_Count = Callable[[float], None]


class CallTiming(NamedTuple):
    """The durations of one call in seconds; None for a part that it did not have.

    `overhead` is the proxy's own part, for a stream up to its head; `inter_token` is the mean after the first token.
    """

    total: float
    first_byte: float | None
    inter_token: float | None
    overhead: float | None

    @classmethod
    def of(cls, record: CallEnded, total: float, overhead: float | None) -> Self:
        """Return the timing of an ended call whose client received its last byte after `total` seconds."""
        if record.first_byte_at is None:
            return cls(total, None, None, overhead)
        first = max(0.0, record.first_byte_at - record.start.started_at)
        # Choices are generated in parallel: the steps of the stream are the tokens of one of them.
        steps = record.completion_tokens // max(1, len(record.choices)) - 1
        inter = max(0.0, record.ended_at - record.first_byte_at) / steps if steps > 0 else None
        return cls(total, first, inter, overhead)


class _Series(NamedTuple):
    """The Prometheus children that a call with one combination of labels adds to."""

    calls: _Count
    links: _Count
    prompt: _Count
    completion: _Count
    context: _Count
    seconds: _Count
    first_token: _Count
    inter_token: _Count


class _KeySeries(NamedTuple):
    """The children of one key, agent and state."""

    calls: _Count
    prompt: _Count
    completion: _Count


class CallCounters:
    """The counters of ended calls."""

    def __init__(self, metrics: ProxyMetrics) -> None:
        self._metrics = metrics
        self._overhead = metrics.overhead_seconds.observe
        self._series: dict[tuple[str, str, str, str, str, str], _Series] = {}
        self._keys: set[str] = set()
        self._key_series: dict[tuple[str, str, str], _KeySeries] = {}

    def count(self, record: CallEnded, timing: CallTiming, failure: str | None) -> None:
        """Count one call; `failure` is its error label."""
        start = record.start
        context = "untrainable" if record.untrainable else record.context
        key = (start.alias, start.dialect, record.state, start.purpose, start.linked_by, context)
        series = self._series.get(key) or self._make_series(key)
        series.calls(1)
        series.links(1)
        series.prompt(record.prompt_tokens)
        series.completion(record.completion_tokens)
        series.context(record.completion_tokens)
        place = (owner(start.key_id), start.alias, record.state)
        of_key = self._key_series.get(place) or self._make_key_series(place)
        of_key.calls(1)
        of_key.prompt(record.prompt_tokens)
        of_key.completion(record.completion_tokens)
        series.seconds(timing.total)
        if timing.overhead is not None:
            self._overhead(timing.overhead)
        if start.streamed and timing.first_byte is not None:
            series.first_token(timing.first_byte)
            if timing.inter_token is not None:
                series.inter_token(timing.inter_token)
        if failure:
            self._metrics.errors.labels(failure).inc()
        if record.untrainable:
            reason = record.untrainable if record.untrainable in _REASONS else "other"
            self._metrics.untrainable.labels(start.alias, reason).inc()

    def _make_series(self, key: tuple[str, str, str, str, str, str]) -> _Series:
        alias, dialect, state, purpose, linked_by, context = key
        metrics = self._metrics
        series = self._series[key] = _Series(
            calls=metrics.calls.labels(alias, dialect, state, purpose).inc,
            links=metrics.links.labels(alias, linked_by).inc,
            prompt=metrics.tokens.labels(alias, "prompt", purpose).inc,
            completion=metrics.tokens.labels(alias, "completion", purpose).inc,
            context=metrics.context_tokens.labels(alias, context).inc,
            seconds=metrics.call_seconds.labels(alias).observe,
            first_token=metrics.first_token_seconds.labels(alias).observe,
            inter_token=metrics.inter_token_seconds.labels(alias).observe,
        )
        return series

    def _make_key_series(self, place: tuple[str, str, str]) -> _KeySeries:
        key, alias, state = place
        label = key or _NO_KEY
        if key and key not in self._keys:
            if len(self._keys) < _MAX_KEYS:
                self._keys.add(key)
            else:
                label = _OTHER_KEYS
        metrics = self._metrics
        series = _KeySeries(
            calls=metrics.key_calls.labels(label, alias, state).inc,
            prompt=metrics.key_tokens.labels(label, alias, "prompt").inc,
            completion=metrics.key_tokens.labels(label, alias, "completion").inc,
        )
        if label != _OTHER_KEYS:
            self._key_series[place] = series
        return series


class LogLine:
    """A line's keys and values, formatted when the line is written."""

    __slots__ = ("_fields",)

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def __str__(self) -> str:
        return " ".join(f"{name}={logfmt(value)}" for name, value in self._fields.items())


def log_call(
    record: CallEnded,
    timing: CallTiming,
    failure: str | None,
    client: str | None = None,
    request_id: str | None = None,
) -> None:
    """Log the end of a call, with `request_id` if its client sent one. Does nothing if the level is above INFO."""
    if log.isEnabledFor(logging.INFO):
        fields = log_fields(record, timing, failure, client)
        if request_id is not None:
            fields["request_id"] = request_id
        log.handle(
            log.makeRecord(log.name, logging.INFO, __file__, 0, LogLine(fields), (), None, "call", {FIELDS: fields})
        )


def log_fields(record: CallEnded, timing: CallTiming, failure: str | None, client: str | None) -> dict[str, Any]:
    """Return the fields of a call's log line, in order."""
    start = record.start
    return {
        "event": "call",
        "call": start.call_id,
        "trajectory": start.trajectory_id,
        "alias": start.alias,
        "version": start.version,
        "dialect": start.dialect,
        "status": record.status,
        "state": str(record.state),
        "streamed": start.streamed,
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "first_byte_ms": _milliseconds(timing.first_byte),
        "total_ms": _milliseconds(timing.total),
        "overhead_ms": _milliseconds(timing.overhead),
        "linked_by": start.linked_by,
        "context": record.context,
        "untrainable": record.untrainable,
        "upstream": _address(record.upstream) if record.upstream else None,
        "client": client,
        "error": failure,
    }


def logfmt(value: Any) -> str:
    """Return a value in logfmt: bare if unambiguous, else in double quotes; empty for None."""
    if value is None:
        return ""
    if value is True or value is False:
        return "true" if value else "false"
    text = str(value)
    if _PLAIN.issuperset(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in escaped) + '"'


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 2)


@lru_cache(maxsize=256)
def _address(url: str) -> str:
    """Return host and port of an upstream: a URL may contain a password."""
    return urlsplit(url).netloc.rpartition("@")[2]
