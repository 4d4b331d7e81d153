"""The frozen records of tool calls: what was sampled, what came of it, and how often."""

from __future__ import annotations

from collections.abc import Mapping

from ratchet.store.records.base import Record
from ratchet.store.states import ToolOutcome, ToolResult


class ToolCall(Record, frozen=True):
    """A sampled tool call and what became of it; `result` is None until a later request tells it."""

    call_id: str
    choice: int
    place: int  # among the tool calls of the choice, from 0
    alias: str
    version: int
    tool: str
    tool_call_id: str
    outcome: ToolOutcome
    detail: str | None = None  # what does not fit, without the values
    result: ToolResult | None = None


class ToolCallResult(Record, frozen=True):
    """What a request's messages say came of a tool call of an earlier call."""

    call_id: str  # the earlier call
    choice: int
    tool_call_id: str
    result: ToolResult


class ToolCallCounts(Record, frozen=True):
    """How often a tool was called under one policy version, by outcome and by result."""

    alias: str
    version: int
    tool: str
    calls: int
    outcomes: Mapping[str, int]
    results: Mapping[str, int]
