"""What agents do, by policy version: calls, tool calls, tokens and time per trajectory, and which tools. Reads only.

Of each version the newest `SAMPLE` live trajectories that have ended are counted, each found by index, so that the cost
does not grow with the store. Intervals are those of the mean in the normal approximation.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.db.engine import read
from ratchet.store.records.base import Record
from ratchet.store.states import CallState, ToolOutcome, ToolResult, TrajectoryState
from ratchet.store.training.tool_times import ToolTime, times_by_tool

SAMPLE = 200  # trajectories of a version
MAX_VERSIONS = 50  # the newest ones, besides the oldest
_MAX_TOOLS = 50  # of a version
_Z = statistics.NormalDist().inv_cdf(0.975)
_RIGHT = (ToolOutcome.VALID, ToolOutcome.UNCHECKED)


class MeanInterval(Record, frozen=True):
    """A mean per trajectory with its 95% interval; null bounds with a single trajectory."""

    mean: float
    low: float | None
    high: float | None


class ToolUse(Record, frozen=True):
    """How a version uses a tool: calls per trajectory, and the share of trajectories that call it."""

    tool: str
    per_trajectory: float
    trajectory_share: float
    seconds: ToolTime | None  # until the result; null without results


class VersionBehavior(Record, frozen=True):
    """The behavior of a version, over its newest trajectories. Shares are null if there is nothing to divide by."""

    version: int
    trajectories: int
    means: Mapping[str, MeanInterval]  # calls, tool_calls, sampled_tokens, seconds: per trajectory
    invalid_tool_calls: float | None  # share of the tool calls that do not fit the offered tools
    failed_tool_calls: float | None  # share of the known results that are errors, timeouts or empty
    truncated_answers: float | None  # share of the answers that reached their length limit
    tools: tuple[ToolUse, ...]  # most called first


class VersionBehaviors:
    """Queries on behavior by version."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def by_version(self, alias: str) -> list[VersionBehavior]:
        """Return the behavior of an alias's versions that have trajectories, oldest first."""
        policies = schema.policies
        known = sa.select(policies.c.version).where(policies.c.alias == alias).order_by(policies.c.version)
        with read(self._engine) as connection:
            versions = list(connection.scalars(known))
            chosen = versions if len(versions) <= MAX_VERSIONS else [versions[0], *versions[-MAX_VERSIONS:]]
            found = (_of_version(connection, alias, version) for version in chosen)
            return [behavior for behavior in found if behavior is not None]


def _of_version(connection: sa.Connection, alias: str, version: int) -> VersionBehavior | None:
    trajectories = schema.trajectories
    mine = sa.and_(trajectories.c.alias == alias, trajectories.c.version == version)
    ended = sa.and_(trajectories.c.purpose == "live", trajectories.c.state != TrajectoryState.OPEN)
    newest = (
        sa.select(trajectories.c.id, (trajectories.c.last_active_at - trajectories.c.opened_at).label("seconds"))
        .where(mine, ended)
        .order_by(trajectories.c.opened_at.desc())
        .limit(SAMPLE)
    )
    seconds = {row.id: float(row.seconds) for row in connection.execute(newest)}
    if not seconds:
        return None
    names = list(seconds)
    called, answers, truncated = _calls(connection, names)
    tools, per_tool, invalid, known, failed = _tool_calls(connection, names)
    times = times_by_tool(connection, names) if known else {}
    means = {
        "calls": [float(called[name][0]) for name in names],
        "tool_calls": [float(tools[name]) for name in names],
        "sampled_tokens": [float(called[name][1]) for name in names],
        "seconds": list(seconds.values()),
    }
    return VersionBehavior(
        version=version,
        trajectories=len(names),
        means={name: _interval(values) for name, values in means.items()},
        invalid_tool_calls=_share(invalid, tools.total()),
        failed_tool_calls=_share(failed, known),
        truncated_answers=_share(truncated, answers),
        tools=tuple(
            ToolUse(
                tool=tool,
                per_trajectory=sum(by.values()) / len(names),
                trajectory_share=len(by) / len(names),
                seconds=times.get(tool),
            )
            for tool, by in sorted(per_tool.items(), key=lambda one: (-one[1].total(), one[0]))[:_MAX_TOOLS]
        ),
    )


def _calls(connection: sa.Connection, names: Sequence[str]) -> tuple[dict[str, tuple[int, int]], int, int]:
    """Return (calls, sampled tokens) by trajectory, and the counts of answers and of truncated ones."""
    calls, choices = schema.calls, schema.choices
    sizes = sa.select(calls.c.trajectory_id, sa.func.count(), sa.func.sum(calls.c.completion_tokens))
    sizes = sizes.where(calls.c.trajectory_id.in_(names)).group_by(calls.c.trajectory_id)
    of_each: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    of_each |= {name: (int(count), int(tokens)) for name, count, tokens in connection.execute(sizes)}
    ends = (
        sa.select(choices.c.finish_reason, sa.func.count())
        .join(calls, calls.c.id == choices.c.call_id)
        .where(calls.c.trajectory_id.in_(names), calls.c.state == CallState.ANSWERED)
        .group_by(choices.c.finish_reason)
    )
    reasons = {reason: int(count) for reason, count in connection.execute(ends)}
    return of_each, sum(reasons.values()), reasons.get("length", 0)


def _tool_calls(
    connection: sa.Connection, names: Sequence[str]
) -> tuple[Counter[str], dict[str, Counter[str]], int, int, int]:
    """Return tool calls by trajectory, and by tool and trajectory; how many are invalid, have a result, failed."""
    calls, rows = schema.calls, schema.tool_calls
    keys = (calls.c.trajectory_id, rows.c.tool, rows.c.outcome, rows.c.result)
    query = sa.select(*keys, sa.func.count()).join(calls, calls.c.id == rows.c.call_id)
    query = query.where(calls.c.trajectory_id.in_(names)).group_by(*keys)
    of_each: Counter[str] = Counter()
    per_tool: dict[str, Counter[str]] = defaultdict(Counter)
    invalid = known = failed = 0
    for name, tool, outcome, result, count in connection.execute(query):
        of_each[name] += count
        per_tool[tool][name] += count
        invalid += count * (outcome not in _RIGHT)
        known += count * (result is not None)
        failed += count * (result not in (None, ToolResult.OK))
    return of_each, per_tool, invalid, known, failed


def _interval(values: Sequence[float]) -> MeanInterval:
    mean = statistics.fmean(values)
    if len(values) < 2:
        return MeanInterval(mean=mean, low=None, high=None)
    error = _Z * statistics.stdev(values) / math.sqrt(len(values))
    return MeanInterval(mean=mean, low=max(0.0, mean - error), high=mean + error)


def _share(part: Any, whole: Any) -> float | None:
    return float(part) / float(whole) if whole else None
