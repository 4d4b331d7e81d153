"""What processes tell each other through the store: leases, proxies, alarms, activity and progress."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence, Set
from datetime import datetime
from enum import StrEnum
from typing import Any

import msgspec
import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.db.bulk import execute_many, insert_or_ignore
from ratchet.store.db.engine import read, write
from ratchet.store.db.verbs import Verbs, matches
from ratchet.store.operation_records import Alarm, JobProgress, LeaseHolder, ProxyInstance
from ratchet.store.records import REQUESTED
from ratchet.store.states import FINISH, GroupState, RolloutState, TrajectoryState

# Leases: one owner at a time, while it renews the lease.


class Leases(Verbs):
    """Operations on leases. Owners are names that the caller makes unique, e.g. host, pid and a random part."""

    def acquire(self, name: str, owner: str, seconds: float) -> bool:
        """Acquire or renew a lease for `seconds`; return False if another owner holds it."""
        table, now = schema.leases, time.time()
        with write(self._engine) as connection:
            insert_or_ignore(connection, table, [{"name": name, "owner": owner, "expires_at": now + seconds}])
            free = sa.or_(table.c.owner == owner, table.c.expires_at < now)
            change = sa.update(table).where(table.c.name == name, free).values(owner=owner, expires_at=now + seconds)
            return bool(connection.execute(change).rowcount)

    def renew(self, names: Collection[str], owner: str, seconds: float) -> set[str]:
        """Renew those of the leases that `owner` still holds for `seconds`; return their names."""
        table = schema.leases
        mine = matches(table, name=sorted(names), owner=owner)
        with write(self._engine) as connection:
            renewed = sa.update(table).where(mine).values(expires_at=time.time() + seconds)
            return set(connection.scalars(renewed.returning(table.c.name)))

    def holders(self, prefix: str) -> list[LeaseHolder]:
        """Return the leases with this name prefix that have not expired, by name."""
        table = schema.leases
        query = sa.select(table).where(table.c.name >= prefix, table.c.name < f"{prefix}\U0010ffff")
        return self._records(LeaseHolder, query.where(table.c.expires_at >= time.time()).order_by(table.c.name))

    def release(self, name: str, owner: str) -> None:
        """Release a lease; no effect if `owner` does not hold it."""
        self._change(sa.delete(schema.leases).where(matches(schema.leases, name=name, owner=owner)))


# Running proxies with the versions that they serve, so that the trainer knows when a version has drained.

PROXY_TIMEOUT_SECONDS = 10.0  # without a heartbeat for this long, a proxy counts as stopped
_DELETE_AFTER_SECONDS = 3600.0  # without a heartbeat for this long, its row is deleted


class ProxyInstances(Verbs):
    def heartbeat(self, instance: ProxyInstance, previous: float = 0.0) -> bool:
        """Store the current state of a proxy; its first one deletes the rows of proxies that stopped long ago.

        Return whether the store has the heartbeat of `previous`; else it is another one, or older than it was.
        """
        table = schema.proxy_instances
        row = msgspec.structs.asdict(instance)
        own = sa.update(table).where(table.c.id == instance.id).values(**row)
        with write(self._engine) as connection:
            if connection.execute(own.where(table.c.heartbeat_at >= previous)).rowcount:
                return True
            if connection.execute(own).rowcount:
                return False
            insert_or_ignore(connection, table, [row])
            stopped = table.c.heartbeat_at < instance.heartbeat_at - _DELETE_AFTER_SECONDS
            connection.execute(sa.delete(table).where(stopped))
        return False

    def server_started_at(self) -> datetime | None:
        """Return when PostgreSQL's server was started; None for SQLite.

        It is another time after a restart and after a failover, in which the last commits may have been lost.
        """
        if self._engine.dialect.name == "sqlite":
            return None
        started_at: datetime | None = self._value(sa.select(sa.func.pg_postmaster_start_time()))
        return started_at

    def running(self, alias: str | None, since: float) -> list[ProxyInstance]:
        """Return the proxies with a heartbeat since then (Unix seconds) that serve an alias, or any."""
        table = schema.proxy_instances
        instances = self._records(ProxyInstance, sa.select(table).where(table.c.heartbeat_at >= since))
        return [instance for instance in instances if alias is None or alias in instance.live_versions]

    def shipped_until(self, alias: str | None, now: float, since: float) -> float:
        """Return the time up to which every running proxy of an alias, or of any, has shipped its records.

        It is `now` if none is running.
        """
        return min([now, *(instance.shipped_until for instance in self.running(alias, since))])

    def remove(self, instance_id: str) -> None:
        """Delete a proxy that has stopped."""
        self._change(sa.delete(schema.proxy_instances).where(schema.proxy_instances.c.id == instance_id))


# Alarms: conditions that need a person. Raising one again increments its count; a cleared one stays readable.


class Alarms(Verbs):
    def raise_(self, name: str, reason: str) -> None:
        """Raise an alarm; if it is active, increment its count and update its reason."""
        table, now = schema.alarms, time.time()
        row = {"name": name, "reason": reason, "raised_at": now, "last_raised_at": now, "count": 0, "cleared_at": None}
        raised_at = sa.case((table.c.cleared_at.is_not(None), now), else_=table.c.raised_at)
        again = {"reason": reason, "last_raised_at": now, "raised_at": raised_at, "cleared_at": None}
        with write(self._engine) as connection:
            insert_or_ignore(connection, table, [row])
            active = sa.update(table).where(table.c.name == name)
            connection.execute(active.values(**again, count=table.c.count + 1))

    def clear(self, *names: str) -> None:
        """Clear alarms; no effect on those that are not active."""
        table = schema.alarms
        active = sa.and_(table.c.name.in_(names), table.c.cleared_at.is_(None))
        if self._values(sa.select(table.c.name).where(active)):  # most are not, and a reader waits for nobody
            self._change(sa.update(table).where(active).values(cleared_at=time.time()))

    def unsent(self, now: float, quiet_seconds: float) -> list[Alarm]:
        """Return the alarms whose raising or clearing was not sent, oldest first.

        An alarm that was cleared before it was sent is left out; so is one that is active again within `quiet_seconds`
        of its last message, until these are over.
        """
        table = schema.alarms
        again = sa.and_(table.c.sent_at < table.c.raised_at, table.c.sent_at <= now - quiet_seconds)
        raised = sa.and_(table.c.cleared_at.is_(None), sa.or_(table.c.sent_at.is_(None), again))
        cleared = sa.and_(table.c.sent_at >= table.c.raised_at, table.c.sent_at < table.c.cleared_at)
        query = sa.select(table).where(sa.or_(raised, cleared)).order_by(table.c.last_raised_at, table.c.name)
        return self._records(Alarm, query)

    def mark_sent(self, alarm: Alarm, now: float) -> None:
        """Record that an alarm was sent as it was read; a change since then is sent as well."""
        table = schema.alarms
        changed_at = alarm.raised_at if alarm.cleared_at is None else alarm.cleared_at
        same = matches(table, name=alarm.name, raised_at=alarm.raised_at)
        as_read = sa.update(table).where(same, table.c.cleared_at.is_not_distinct_from(alarm.cleared_at))
        self._change(as_read.values(sent_at=max(now, changed_at)))

    def active(self) -> list[Alarm]:
        """Return the alarms that are not cleared, newest first."""
        return [alarm for alarm in self.all() if alarm.cleared_at is None]

    def all(self) -> list[Alarm]:
        """Return all alarms, including cleared ones, the latest first."""
        return self._records(Alarm, sa.select(schema.alarms).order_by(schema.alarms.c.last_raised_at.desc()))


# Activity: one query that tells for all agents whether a trainer that waits would find something to do.
#
# It covers what others do (calls that became idle, rollouts that ended, trajectories that were finished, retries of a
# judge that are due, new versions, decisions and feedback), and which kinds of work wait at all, so that a step need
# not ask for each of them. It is a hint that spares queries, not a promise: a trainer looks from time to time in any
# case.

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


class Activity(Verbs):
    """What has happened lately, by agent."""

    def __init__(self, engine: sa.Engine) -> None:
        super().__init__(engine)
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


# Job progress: how far each long phase of a trainer is, one row per alias and phase. For display only.


class JobProgressVerbs(Verbs):
    def update(self, progress: Sequence[JobProgress]) -> None:
        """Replace the progress of some phases, in one transaction."""
        rows = [msgspec.structs.asdict(one) | {"means": dict(one.means)} for one in progress]
        table = schema.job_progress
        new: dict[Any, Any] = {
            column: sa.bindparam(f"new_{column.name}") for column in table.c if not column.primary_key
        }
        mine = matches(table, alias=sa.bindparam("new_alias"), phase=sa.bindparam("new_phase"))
        with write(self._engine) as connection:
            insert_or_ignore(connection, table, rows)
            renamed = [{f"new_{name}": value for name, value in row.items()} for row in rows]
            execute_many(connection, sa.update(table).where(mine).values(new), renamed)

    def all(self, alias: str | None = None) -> list[JobProgress]:
        """Return the progress of one alias or of all, the latest update first."""
        table = schema.job_progress
        query = sa.select(table).where(matches(table, alias=alias)).order_by(table.c.updated_at.desc())
        return self._records(JobProgress, query)
