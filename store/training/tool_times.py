"""How long agents wait for each tool, from the times of their calls. Reads only.

The time runs from the end of the call that asks for a tool to the start of the next call, which brings the result. It
includes what the agent does in between, and tools that one answer asks for share it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.records.base import Record
from ratchet.store.statistics import nearest_rank


class ToolTime(Record, frozen=True):
    """Seconds until the result of a tool's calls: median and 95th percentile of `count` measurements."""

    count: int
    p50: float
    p95: float


def times_by_tool(connection: sa.Connection, trajectories: Sequence[str]) -> dict[str, ToolTime]:
    """Return the times of the tool calls of these trajectories whose result is known, by tool."""
    waits = _waits(connection, trajectories)
    calls, rows = schema.calls, schema.tool_calls
    query = sa.select(rows.c.tool, rows.c.call_id, rows.c.choice).join(calls, calls.c.id == rows.c.call_id)
    query = query.where(calls.c.trajectory_id.in_(trajectories), rows.c.result.is_not(None))
    found = defaultdict(list)
    for tool, call, choice in connection.execute(query):
        if (call, choice) in waits:
            found[tool].append(waits[call, choice])
    return {tool: _time(sorted(seconds)) for tool, seconds in found.items()}


def _waits(connection: sa.Connection, trajectories: Sequence[str]) -> Mapping[tuple[str, int], float]:
    """Return the seconds from the end of a call to the first call that continues it, by call and choice."""
    calls = schema.calls
    query = sa.select(calls.c.id, calls.c.parent_call, calls.c.parent_choice, calls.c.started_at, calls.c.ended_at)
    found = connection.execute(query.where(calls.c.trajectory_id.in_(trajectories)).order_by(calls.c.started_at)).all()
    ends = {row.id: row.ended_at for row in found}
    waits: dict[tuple[str, int], float] = {}
    for row in found:
        if (end := ends.get(row.parent_call)) is not None:
            waits.setdefault((row.parent_call, row.parent_choice), max(0.0, row.started_at - end))
    return waits


def _time(ordered: Sequence[float]) -> ToolTime:
    return ToolTime(count=len(ordered), p50=nearest_rank(ordered, 0.5), p95=nearest_rank(ordered, 0.95))
