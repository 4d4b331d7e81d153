"""Activity: one query that tells for all agents whether a trainer that waits would find something to do.

It covers what others do (calls that became idle, rollouts that ended, trajectories that were finished, retries of a
judge that are due, new versions, decisions and feedback), and which kinds of work wait at all, so that a step need not
ask for each of them. It is a hint that spares queries, not a promise: a trainer looks from time to time in any case.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Set
from enum import StrEnum
from typing import Any

import sqlalchemy as sa

from ratchet.store.coordination.proxies import PROXY_TIMEOUT_SECONDS
from ratchet.store.db import schema
from ratchet.store.db.engine import read
from ratchet.store.records import REQUESTED
from ratchet.store.states import FINISH, GroupState, RolloutState, TrajectoryState

_RECENT_SECONDS = 60.0  # of feedback that is looked at


class ActivityKind(StrEnum):
    """What is counted by agent: a number, or the newest time or id."""

    IDLE = "idle"  # open trajectories without a call for some time
    ENDED = "ended"  # open trajectories of rollouts that ended
    FINISHED = "finished"  # the newest seal on request, or at the end of a rollout
    RETRY = "retry"  # groups whose next attempt at a judge is due
    VERSION = "version"  # the newest version
    DECISION = "decision"  # the newest decision on a version
    FEEDBACK = "feedback"  # the newest feedback
    SEALED = "sealed"  # trajectories that wait for a group
    READY = "ready"  # groups that wait for the judge
    JUDGED = "judged"  # groups that wait for a round
    REQUESTED = "requested"  # the newest of them whose training a caller asked for


ALL_KINDS: Set[str] = frozenset(ActivityKind)
_WAITING = frozenset({ActivityKind.SEALED, ActivityKind.READY, ActivityKind.JUDGED})
AgentActivity = Mapping[str, Any]


def has_grown(before: AgentActivity, after: AgentActivity) -> bool:
    """Whether others have made something to do. What only waits was left by the trainer itself."""
    return any(kind not in before or value > before[kind] for kind, value in after.items() if kind not in _WAITING)


class Activity:
    """What has happened lately, by agent."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._query = _query()

    def read(self, idle_seconds: float) -> dict[str, AgentActivity]:
        """Return what waits for each agent now. Trajectories count if they had no call for `idle_seconds`."""
        now = time.time()
        times = {"now": now, "beat": now - PROXY_TIMEOUT_SECONDS, "idle": idle_seconds, "recent": now - _RECENT_SECONDS}
        found: dict[str, dict[str, Any]] = {}
        with read(self._engine) as connection:
            for kind, alias, number, name in connection.execute(self._query, times):
                found.setdefault(alias, {})[kind] = name if number is None else number
        return dict(found)


def _query() -> sa.CompoundSelect[Any]:
    trajectories, groups, rollouts = schema.trajectories, schema.groups, schema.rollouts
    policies, decisions, feedback = schema.policies, schema.decisions, schema.feedback
    now, proxies = sa.bindparam("now", type_=sa.Double), schema.proxy_instances
    shipped = sa.func.coalesce(
        sa.select(sa.func.min(proxies.c.shipped_until))
        .where(proxies.c.heartbeat_at >= sa.bindparam("beat", type_=sa.Double))
        .scalar_subquery(),
        now,
    )
    is_open, is_sealed = (trajectories.c.state == state for state in (TrajectoryState.OPEN, TrajectoryState.SEALED))
    idle = trajectories.c.last_active_at <= shipped - sa.bindparam("idle", type_=sa.Double)
    ended = sa.and_(rollouts.c.state != RolloutState.ABANDONED, rollouts.c.ended_at < shipped)
    is_ready, is_judged = (groups.c.state == state for state in (GroupState.READY, GroupState.JUDGED))
    recent = sa.and_(feedback.c.given_at >= sa.bindparam("recent", type_=sa.Double), feedback.c.value.is_not(None))
    newest_feedback = sa.func.max(feedback.c.id)
    kinds, by_alias = ActivityKind, trajectories.c.alias
    return sa.union_all(
        _count(kinds.IDLE, trajectories).where(is_open, idle).group_by(by_alias),
        _count(kinds.ENDED, trajectories)
        .select_from(trajectories.join(rollouts, rollouts.c.id == trajectories.c.id))
        .where(is_open, ended)
        .group_by(by_alias),
        _newest(kinds.FINISHED, trajectories, trajectories.c.sealed_at)
        .where(is_sealed, trajectories.c.sealed_by == FINISH)
        .group_by(by_alias),
        _count(kinds.SEALED, trajectories).where(is_sealed).group_by(by_alias),
        _count(kinds.RETRY, groups).where(is_ready, groups.c.retry_at <= now).group_by(groups.c.alias),
        _count(kinds.READY, groups).where(is_ready).group_by(groups.c.alias),
        _count(kinds.JUDGED, groups).where(is_judged).group_by(groups.c.alias),
        sa.select(sa.literal(str(kinds.REQUESTED)), groups.c.alias, sa.null(), sa.func.max(groups.c.id))
        .where(is_judged, groups.c.key.like(f"{REQUESTED}%"))
        .group_by(groups.c.alias),
        _newest(kinds.VERSION, policies, policies.c.version).group_by(policies.c.alias),
        _newest(kinds.DECISION, decisions, decisions.c.id).group_by(decisions.c.alias),
        sa.select(sa.literal(str(kinds.FEEDBACK)), trajectories.c.alias, sa.null(), newest_feedback)
        .select_from(feedback.join(trajectories, trajectories.c.id == feedback.c.trajectory_id))
        .where(recent)
        .group_by(trajectories.c.alias),
    )


def _count(kind: ActivityKind, table: sa.Table) -> sa.Select[Any]:
    return sa.select(
        sa.literal(str(kind)), table.c.alias, sa.cast(sa.func.count(), sa.Double), sa.cast(sa.null(), sa.Text)
    )


def _newest(kind: ActivityKind, table: sa.Table, column: sa.ColumnElement[Any]) -> sa.Select[Any]:
    newest = sa.cast(sa.func.max(column), sa.Double)
    return sa.select(sa.literal(str(kind)), table.c.alias, newest, sa.cast(sa.null(), sa.Text))
