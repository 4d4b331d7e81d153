"""What became of a trajectory's tool calls, as judges and graders are given it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ratchet.store.records import Transcript
from ratchet.store.records.tool_calls import ToolCall
from ratchet.store.states import ToolOutcome, ToolResult

_UNFIT = frozenset(ToolOutcome) - {ToolOutcome.VALID, ToolOutcome.UNCHECKED}
_FAILED = (ToolResult.ERROR, ToolResult.TIMEOUT)


def tool_outcomes(member: Transcript) -> list[dict[str, Any]]:
    """Return one JSON object per tool call that was taken, in order.

    `outcome` is what the call is, held against the tools of its own request; `result` is what came back, None where
    the next request did not say; docs/tools.md lists both.
    """
    return [
        {
            "tool": one.tool,
            "tool_call_id": one.tool_call_id,
            "outcome": one.outcome.value,
            "detail": one.detail,
            "result": None if one.result is None else one.result.value,
        }
        for one in taken(member)
    ]


def success_share(member: Transcript) -> float:
    """Return the share of tool calls that fit their tool and did not fail, 1.0 where no tool was called."""
    made = taken(member)
    good = sum(one.outcome not in _UNFIT and one.result not in _FAILED for one in made)
    return good / len(made) if made else 1.0


def taken(member: Transcript) -> Sequence[ToolCall]:
    """Return the tool calls of the answers that the agent went on from, and of those that nothing continues."""
    followed: dict[str, set[int]] = {}
    for call in member.calls:
        if call.parent_call is not None:
            followed.setdefault(call.parent_call, set()).add(call.parent_choice)
    return [one for one in member.tool_calls if one.choice in followed.get(one.call_id, {one.choice})]
