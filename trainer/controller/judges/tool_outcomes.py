"""The outcomes of a trajectory's tool calls, for judges and graders. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ratchet.store.records import ToolCall, Transcript


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


def used_tool_calls(member: Transcript) -> Sequence[ToolCall]:
    """Return the tool calls of answers that the agent continued, and of calls that have no continuation."""
    followed: dict[str, set[int]] = {}
    for call in member.calls:
        if call.parent_call is not None:
            followed.setdefault(call.parent_call, set()).add(call.parent_choice)
    return [one for one in member.tool_calls if one.choice in followed.get(one.call_id, {one.choice})]
