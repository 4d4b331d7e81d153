"""The query parameters of lists."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

from ratchet.store.calls.trajectory_filter import TrajectoryFilter
from ratchet.store.states import ToolOutcome, ToolResult, TrajectoryState

Limit = Annotated[int, Query(ge=1, le=1000)]


def chosen_trajectories(
    state: TrajectoryState | None = None,
    alias: str | None = None,
    version: int | None = None,
    task: str | None = None,
    key: str | None = None,
    tag: str | None = None,
    since: float | None = None,
    until: float | None = None,
    search: str | None = None,
    round: str | None = None,
    role: str | None = None,
    scored: bool | None = None,
    min_score: float | None = None,
    max_score: float | None = None,
    tool: str | None = None,
    outcome: ToolOutcome | ToolResult | None = None,
) -> TrajectoryFilter:
    """Return the filter: equal values; opened from `since` and before `until`; ids that start with `search`.

    Scores are the latest ones; `role` of one of the calls; `tool` and `outcome` of one of the tool calls.
    """
    return TrajectoryFilter(
        state=state, alias=alias, version=version, task=task, key=key, tag=tag, since=since, until=until,
        search=search, round=round, role=role, scored=scored, min_score=min_score, max_score=max_score, tool=tool,
        outcome=outcome,
    )  # fmt: skip
