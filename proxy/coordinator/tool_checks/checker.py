"""Checks the tool calls in shipped records, and reads the results of earlier ones; off the path of every call.

    consumes  records that were just shipped (in the process that ships the journal)
    produces  rows in the store's `tool_calls`, and counts for Prometheus

Promises: a record that is shipped again changes and counts nothing. No failure here stops the shipping. Rows that the
store fails to write are not retried: they are observations, not records.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ratchet.proxy.telemetry.metrics import ProxyMetrics
from ratchet.store.records import CallEnded, CallRecord, CallStarted, ToolCall, ToolCallResult
from ratchet.store.states import CallState, ToolOutcome
from ratchet.store.store import Store

if TYPE_CHECKING:
    from ratchet.proxy.coordinator.tool_checks.toolset import Toolset

log = logging.getLogger("ratchet.proxy")

_MAX_TOOLSETS = 256  # cached
_MAX_TEXT = 200  # characters
_MAX_LABELS = 100  # of tool names in Prometheus: clients choose the names
_MAX_LABEL_LENGTH = 64

_object = msgspec.json.Decoder(dict[str, Any]).decode


class ToolCallCount(msgspec.Struct, frozen=True):
    """New outcomes, or new results, of a tool's calls."""

    tool: str
    outcome: str | None
    result: str | None
    count: int


class ToolCallChecker:
    """The checker. Caches the most recent tool lists."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._toolsets: OrderedDict[str, Toolset] = OrderedDict()

    def check(self, records: Sequence[CallRecord]) -> list[ToolCallCount]:
        """Check records that were just shipped; return the new counts. Raises nothing."""
        try:
            calls = [row for end in records if isinstance(end, CallEnded) for row in self._tool_calls(end)]
            results = [result for record in records for result in _tool_results(_start_of(record))]
            return _counted(*self._store.tools.record_tool_calls(calls, results))
        except Exception as error:
            log.exception("event=tool_checks_failed records=%d reason=%r", len(records), str(error))
            return []

    def _tool_calls(self, end: CallEnded) -> Iterator[ToolCall]:
        if end.state != CallState.ANSWERED:
            return
        bodies = {node.hash: node.body for node in end.nodes if b'"tool_calls"' in node.body}
        for choice in end.choices:
            body = bodies.get(choice.reply_node)
            calls = _object(body).get("tool_calls") if body is not None else None
            for place, call in enumerate(calls if isinstance(calls, list) else ()):
                yield self._check_call(end.start, choice.index, place, call)

    def _check_call(self, start: CallStarted, choice: int, place: int, call: Any) -> ToolCall:
        call = call if isinstance(call, dict) else {}
        function = call.get("function") if isinstance(call.get("function"), dict) else {}
        name = str(function.get("name") or "")
        outcome, detail = self._toolset(start).check_call(name, function.get("arguments"))
        return ToolCall(
            call_id=start.call_id,
            choice=choice,
            place=place,
            alias=start.alias,
            version=start.version,
            tool=_plain(name),
            tool_call_id=_plain(str(call.get("id") or "")),
            outcome=outcome,
            detail=_plain(detail) if detail else None,
        )

    def _toolset(self, start: CallStarted) -> Toolset:
        # Imports JSON Schema, which only a process that checks needs.
        from ratchet.proxy.coordinator.tool_checks.toolset import Toolset

        name = start.tools_hash
        known = self._toolsets.get(name)
        if known is None:
            body = (start.tools or self._store.tools.toolset(name)) if name else b""
            known = Toolset(body)
            if body is None:
                return known  # not cached: a later record may contain it
            self._toolsets[name] = known
        self._toolsets.move_to_end(name)
        if len(self._toolsets) > _MAX_TOOLSETS:
            self._toolsets.popitem(last=False)
        return known


class ToolCallCounters:
    """Prometheus counters of tool calls. Names after the first hundred are counted as `other`."""

    def __init__(self, metrics: ProxyMetrics) -> None:
        self._metrics = metrics
        self._names: set[str] = set()

    def count(self, counts: Iterable[ToolCallCount]) -> None:
        """Add new counts."""
        for one in counts:
            name = self._limit_names(one.tool[:_MAX_LABEL_LENGTH])
            if one.outcome is not None:
                self._metrics.tool_calls.labels(name, one.outcome).inc(one.count)
            if one.result is not None:
                self._metrics.tool_results.labels(name, one.result).inc(one.count)

    def _limit_names(self, name: str) -> str:
        if name not in self._names:
            if len(self._names) >= _MAX_LABELS:
                return "other"
            self._names.add(name)
        return name


def _start_of(record: CallRecord) -> CallStarted:
    return record.start if isinstance(record, CallEnded) else record


def _tool_results(start: CallStarted) -> Iterator[ToolCallResult]:
    """Yield the results of the parent call's tool calls, from the tool messages of the prompt's last turn."""
    from ratchet.proxy.coordinator.tool_checks.tool_results import result_of

    if start.parent_call is None:
        return
    for node in reversed(start.nodes):
        if node.role == "assistant":
            return
        if node.role == "tool":
            message = _object(node.body)
            yield ToolCallResult(
                call_id=start.parent_call,
                choice=start.parent_choice,
                tool_call_id=_plain(str(message.get("tool_call_id") or "")),
                result=result_of(message),
            )


def _counted(new: Iterable[ToolCall], answered: Iterable[ToolCall]) -> list[ToolCallCount]:
    counts: Counter[tuple[str, str | None, str | None]] = Counter()
    for row in new:
        counts[_label(row), row.outcome, None] += 1
    for row in answered:
        counts[_label(row), None, row.result] += 1
    return [ToolCallCount(tool, outcome, result, count) for (tool, outcome, result), count in counts.items()]


def _label(row: ToolCall) -> str:
    """Return a tool's name for Prometheus, without names that the model hallucinated."""
    return "(unknown)" if row.outcome == ToolOutcome.UNKNOWN_TOOL else row.tool


def _plain(text: str) -> str:
    """Return a text that every database can store."""
    return text[:_MAX_TEXT].replace("\0", "\ufffd")
