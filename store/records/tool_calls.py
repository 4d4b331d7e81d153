"""The frozen records of tool calls, their results and their counts."""

from __future__ import annotations

from collections.abc import Mapping

from ratchet.store.records.base import Record
from ratchet.store.states import ToolOutcome, ToolResult


class ToolCall(Record, frozen=True):
    """A sampled tool call with its outcome; `result` is None until a later request contains it."""

    call_id: str
    choice: int
    place: int  # among the tool calls of the choice, from 0
    alias: str
    version: int
    tool: str
    tool_call_id: str
    outcome: ToolOutcome
    detail: str | None = None  # the mismatch, without values
    result: ToolResult | None = None


class ToolCallResult(Record, frozen=True):
    """The result of an earlier call's tool call, found in a later request."""

    call_id: str  # the earlier call
    choice: int
    tool_call_id: str
    result: ToolResult


class ToolCallCounts(Record, frozen=True):
    """Counts of a tool's calls under one policy version, by outcome and by result."""

    alias: str
    version: int
    tool: str
    calls: int
    outcomes: Mapping[str, int]
    results: Mapping[str, int]
