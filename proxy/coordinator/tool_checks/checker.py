"""Checks the tool calls in shipped records, and reads what came of earlier ones; off the path of every call.

    consumes  records that the store has just taken (in the process that ships the journal)
    produces  rows in the store's `tool_calls`, and counts for Prometheus

Promises: a record that is shipped again changes and counts nothing; whatever is wrong with a schema, an answer or the
store's mood, shipping goes on. What a failing store keeps from being written here is not tried again: these are
observations, not records.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ratchet.store.records import CallEnded, CallRecord, CallStarted
from ratchet.store.records.tool_calls import ToolCall, ToolCallResult
from ratchet.store.states import CallState, ToolOutcome
from ratchet.store.store import Store

if TYPE_CHECKING:
    from ratchet.proxy.coordinator.tool_checks.toolset import Toolset

log = logging.getLogger("ratchet.proxy")

_MOST_TOOLSETS = 256
_LONGEST_NAME = 200

_object = msgspec.json.Decoder(dict[str, Any]).decode


class ToolCallCount(msgspec.Struct, frozen=True):
    """How often something became known of a tool's calls: an outcome, or the result of one."""

    tool: str
    outcome: str | None
    result: str | None
    count: int


class ToolCallChecker:
    """The checker. Remembers the tool lists that it has seen last."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._toolsets: OrderedDict[str, Toolset] = OrderedDict()

    def check(self, records: Sequence[CallRecord]) -> list[ToolCallCount]:
        """Check what the store has just taken; return what is new. Raises nothing."""
        try:
            found = [row for end in records if isinstance(end, CallEnded) for row in self._tool_calls(end)]
            answers = [answer for record in records for answer in _answers(_beginning(record))]
            return _counted(*self._store.tools.record_tool_calls(found, answers))
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
                yield self._checked(end.start, choice.index, place, call)

    def _checked(self, start: CallStarted, choice: int, place: int, call: Any) -> ToolCall:
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
        from ratchet.proxy.coordinator.tool_checks.toolset import (
            Toolset,  # with JSON Schema, which only a process that checks needs
        )

        name = start.tools_hash
        known = self._toolsets.get(name)
        if known is None:
            body = (start.tools or self._store.tools.toolset(name)) if name else b""
            known = Toolset(body)
            if body is None:
                return known  # not to be remembered: another record may still bring it
            self._toolsets[name] = known
        self._toolsets.move_to_end(name)
        if len(self._toolsets) > _MOST_TOOLSETS:
            self._toolsets.popitem(last=False)
        return known


def _beginning(record: CallRecord) -> CallStarted:
    return record.start if isinstance(record, CallEnded) else record


def _answers(start: CallStarted) -> Iterator[ToolCallResult]:
    """Return what the last turn of a prompt says came of the tool calls of the call that it continues."""
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
        counts[_shown(row), row.outcome, None] += 1
    for row in answered:
        counts[_shown(row), None, row.result] += 1
    return [ToolCallCount(tool, outcome, result, count) for (tool, outcome, result), count in counts.items()]


def _shown(row: ToolCall) -> str:
    """Return a tool's name for Prometheus; a name that the model made up is none."""
    return "(unknown)" if row.outcome == ToolOutcome.UNKNOWN_TOOL else row.tool


def _plain(text: str) -> str:
    """Return a text that every database takes."""
    return text[:_LONGEST_NAME].replace("\0", "\ufffd")
