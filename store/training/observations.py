"""What trainer and operators observe: recorded figures, the behaviour of versions, tool times and waiting times."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.db.engine import read
from ratchet.store.db.verbs import Verbs, matches
from ratchet.store.operation_records import Observation
from ratchet.store.records import Record
from ratchet.store.states import CallState, PolicyAction, RoundState, ToolOutcome, ToolResult, TrajectoryState
from ratchet.store.statistics import nearest_rank

# Observations: figures that the trainer needs after a restart, such as those of a second judge. Only added.
#
# Guarantee: they contain no content of trajectories, so a deletion keeps them.


class Observations(Verbs):
    def add(self, alias: str, kind: str, subject: str, content: Mapping[str, Any]) -> None:
        """Add an observation."""
        row = {"alias": alias, "kind": kind, "subject": subject, "content": dict(content), "recorded_at": time.time()}
        self._change(sa.insert(schema.observations).values(**row))

    def newest(self, alias: str, kind: str, limit: int) -> list[Observation]:
        """Return the newest `limit` observations of a kind, oldest first."""
        table = schema.observations
        query = sa.select(table).where(matches(table, alias=alias, kind=kind)).order_by(table.c.id.desc())
        return self._records(Observation, query.limit(limit))[::-1]

    def latest(self, alias: str, kind: str, limit: int = 1000) -> dict[str, Observation]:
        """Return the newest observation of each subject, among the newest `limit` of a kind."""
        return {found.subject: found for found in self.newest(alias, kind, limit)}


# What agents do, by policy version: calls, tool calls, tokens and time per trajectory, and which tools. Reads only.
#
# Of each version the newest `BEHAVIOR_SAMPLE` live trajectories that have ended are counted, each found by index, so
# that the cost does not grow with the store. Intervals are those of the mean in the normal approximation.

BEHAVIOR_SAMPLE = 200  # trajectories of a version
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


class VersionBehaviors(Verbs):
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
    mine = matches(trajectories, alias=alias, version=version, purpose="live")
    newest = (
        sa.select(trajectories.c.id, (trajectories.c.last_active_at - trajectories.c.opened_at).label("seconds"))
        .where(mine, trajectories.c.state != TrajectoryState.OPEN)
        .order_by(trajectories.c.opened_at.desc())
        .limit(BEHAVIOR_SAMPLE)
    )
    seconds = {row.id: float(row.seconds) for row in connection.execute(newest)}
    if not seconds:
        return None
    names = list(seconds)
    called, answers, truncated = _calls(connection, names)
    tools, per_tool, invalid, known, failed = _tool_calls(connection, names)
    times = times_by_tool(connection, names) if known else {}
    means: dict[str, Sequence[float]] = {
        "calls": [called[name][0] for name in names],
        "tool_calls": [tools[name] for name in names],
        "sampled_tokens": [called[name][1] for name in names],
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


# How long agents wait for each tool, from the times of their calls. Reads only.
#
# The time runs from the end of the call that asks for a tool to the start of the next call, which brings the result. It
# includes what the agent does in between, and tools that one answer asks for share it.


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
    return {
        tool: ToolTime(len(seconds), *(nearest_rank(sorted(seconds), share) for share in (0.5, 0.95)))
        for tool, seconds in found.items()
    }


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


# How long trajectories wait on their way from the first call to a version that was trained on them. Reads only.
#
# The stages follow each other: the agent works, its trajectory is sealed and grouped, the group is judged, waits for a
# round, is trained, and the new version is proven on the replicas until it serves. Each is measured over the newest
# `SAMPLE` trained trajectories, or the newest `SAMPLE_ROUNDS` committed rounds.

SAMPLE = 1000  # trajectories
SAMPLE_ROUNDS = 200
_SERVES = (PolicyAction.RAMP, PolicyAction.PROMOTE)


class WaitingTime(Record, frozen=True):
    """Percentiles of a stage in seconds; `count` measurements."""

    stage: str
    count: int
    p50: float
    p90: float
    p99: float


class WaitingTimes(Verbs):
    def stages(self, alias: str) -> list[WaitingTime]:
        """Return the stages of an alias in order, without those that were never reached.

        rollout: first to last call; sealing: until no further call is expected; grouping: until the other attempts have
        ended; judging: until the verdict; round: until the learner begins; training: the round; serving: until the new
        version serves; learner_idle: from the end of a round to the start of the next one.
        """
        with read(self._engine) as connection:
            found = _of_trajectories(connection, alias) | _of_rounds(connection, alias)
        return [
            WaitingTime(stage, len(values), *(nearest_rank(sorted(values), share) for share in (0.5, 0.9, 0.99)))
            for stage, values in found.items()
            if values
        ]


def _of_trajectories(connection: sa.Connection, alias: str) -> dict[str, list[float]]:
    trajectories, groups, rounds, verdicts = schema.trajectories, schema.groups, schema.rounds, schema.verdicts
    mine = matches(trajectories, alias=alias, state=TrajectoryState.TRAINED)
    newest = sa.select(trajectories).where(mine).order_by(trajectories.c.opened_at.desc()).limit(SAMPLE).subquery()
    given = sa.and_(verdicts.c.trajectory_id == newest.c.id, verdicts.c.score.is_not(None))
    judged = sa.select(sa.func.min(verdicts.c.judged_at)).where(given, verdicts.c.judged_at >= groups.c.formed_at)
    query = (
        sa.select(
            newest.c.opened_at, newest.c.last_active_at, newest.c.sealed_at, groups.c.formed_at,
            judged.scalar_subquery(), rounds.c.started_at,
        )
        .join(groups, groups.c.id == newest.c.group_id)
        .join(rounds, rounds.c.id == newest.c.round_id)
    )  # fmt: skip
    stages: dict[str, list[float]] = {name: [] for name in ("rollout", "sealing", "grouping", "judging", "round")}
    for times in connection.execute(query):
        for stage, begin, end in zip(stages, times, times[1:], strict=False):
            if begin is not None and end is not None:
                stages[stage].append(max(0.0, end - begin))
    return stages


def _of_rounds(connection: sa.Connection, alias: str) -> dict[str, list[float]]:
    rounds, decisions = schema.rounds, schema.decisions
    committed = matches(rounds, alias=alias, state=RoundState.COMMITTED)
    newest = sa.select(rounds).where(committed).order_by(rounds.c.started_at.desc()).limit(SAMPLE_ROUNDS)
    first = (
        sa.select(decisions.c.version, sa.func.min(decisions.c.decided_at))
        .where(decisions.c.alias == alias, decisions.c.action.in_(_SERVES))
        .group_by(decisions.c.version)
    )
    found = connection.execute(newest).all()[::-1]
    served = {row[0]: float(row[1]) for row in connection.execute(first)}
    ends = [(row, row.ended_at) for row in found if row.ended_at is not None]
    return {
        "training": [max(0.0, end - row.started_at) for row, end in ends],
        "serving": [max(0.0, served[row.to_version] - end) for row, end in ends if row.to_version in served],
        "learner_idle": [max(0.0, later.started_at - end) for (_, end), (later, _) in itertools.pairwise(ends)],
    }
