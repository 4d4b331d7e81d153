"""Tool calls in a store, with their results."""

from __future__ import annotations

from ratchet.store.records import ToolCall, ToolCallResult
from ratchet.store.states import ToolOutcome, ToolResult
from ratchet.store.store import Store


def tool_called(store: Store, name: str, result: ToolResult, times: int = 50, alias: str = "agent") -> None:
    """Ship a one-call trajectory that called a tool this many times with this result."""
    made = [
        ToolCall(
            call_id=f"call_{name}", choice=0, place=place, alias=alias, version=0, tool="search",
            tool_call_id=f"i{place}", outcome=ToolOutcome.VALID,
        )
        for place in range(times)
    ]  # fmt: skip
    results = [
        ToolCallResult(call_id=f"call_{name}", choice=0, tool_call_id=one.tool_call_id, result=result) for one in made
    ]
    store.tools.record_tool_calls(made, results)
