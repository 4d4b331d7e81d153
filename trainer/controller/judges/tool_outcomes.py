"""The outcomes of a trajectory's tool calls, for judges and graders. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ratchet.store.records import Transcript
from ratchet.store.records.tool_calls import ToolCall
from ratchet.store.states import ToolOutcome, ToolResult

_INVALID = frozenset(ToolOutcome) - {ToolOutcome.VALID, ToolOutcome.UNCHECKED}
_FAILED = (ToolResult.ERROR, ToolResult.TIMEOUT)


def tool_outcomes(member: Transcript) -> list[dict[str, Any]]:
    """Return one JSON object per used tool call, in order.

    `outcome` is the check of the call against the tools of its request; `result` is the result of the tool, None if the
    next request does not contain it. docs/tools.md lists both.
    """
    return [
        {
            "tool": one.tool,
            "tool_call_id": one.tool_call_id,
            "outcome": one.outcome.value,
            "detail": one.detail,
            "result": None if one.result is None else one.result.value,
        }
        for one in used_tool_calls(member)
    ]


def success_share(member: Transcript) -> float:
    """Return the share of tool calls that are valid and did not fail, 1.0 without tool calls."""
    calls = used_tool_calls(member)
    successes = sum(one.outcome not in _INVALID and one.result not in _FAILED for one in calls)
    return successes / len(calls) if calls else 1.0


def used_tool_calls(member: Transcript) -> Sequence[ToolCall]:
    """Return the tool calls of answers that the agent continued, and of calls that have no continuation."""
    followed: dict[str, set[int]] = {}
    for call in member.calls:
        if call.parent_call is not None:
            followed.setdefault(call.parent_call, set()).add(call.parent_choice)
    return [one for one in member.tool_calls if one.choice in followed.get(one.call_id, {one.choice})]
