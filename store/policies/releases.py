"""What a release is decided on: the settled outcomes of counted trajectories, and the evidence of each version.

Outcomes come in the order in which their trajectories began, and none comes before an earlier one that is not settled:
counted as they end, quick successes would come before slow failures.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.db.bulk import in_values, insert_or_ignore
from ratchet.store.db.engine import read, write
from ratchet.store.db.verbs import Verbs, matches
from ratchet.store.reasons import DropReason
from ratchet.store.records import ReleaseEvidence, ReleaseOutcome
from ratchet.store.states import CallState, GroupState, TrajectoryState

DEADLINE_SECONDS = 6 * 3600.0  # after its start, until which a trajectory may be finished and scored
_PAGE = 100  # trajectories read at once
# Dropped for what has nothing to do with its version, before anything was known about it.
_NO_OUTCOME = (
    DropReason.EVAL, DropReason.HELD_OUT, DropReason.OTHER_ROLE, DropReason.ABANDONED, DropReason.DOCTOR,
    DropReason.MEMBER_DELETED, DropReason.INCOMPLETE, DropReason.ROLLED_BACK, DropReason.MOVED,
)  # fmt: skip
_FAILED = (CallState.REFUSED, CallState.FAILED, CallState.INTERRUPTED)


class Releases(Verbs):
    """Operations on the outcomes and the evidence of releases."""

    def outcomes(
        self,
        alias: str,
        judge_version: str,
        since: float,
        *,
        after: str = "",
        until: float | None = None,
        deadline_seconds: float = DEADLINE_SECONDS,
        open_seconds: float | None = None,
        limit: int = 1000,
    ) -> list[ReleaseOutcome]:
        """Return the outcomes of the trajectories that began at `since` or later, up to the first unsettled one.

        To go on from an outcome, give its `started_at` as `since` and its id as `after`. A trajectory is settled when
        it is scored by this version of the judge and its group is closed, when it is dropped, or `deadline_seconds`
        after its start; one that is still open, `open_seconds` after its start if that is less. `until`: only those
        that began before, because all records up to then are stored.
        """
        before = time.time() if until is None else until
        overdue = before - deadline_seconds
        overdue_open = overdue if open_seconds is None else before - min(open_seconds, deadline_seconds)
        found: list[ReleaseOutcome] = []
        with read(self._engine) as connection:
            while len(found) < limit:
                page = _page(connection, alias, since, after, before)
                scores = _scores(connection, [row.id for row in page], judge_version)
                settled = _settled(page, scores, overdue, overdue_open)
                counted = [row for row in settled if row.id in scores or row.drop_reason not in _NO_OUTCOME]
                found += _outcomes(connection, counted, scores, judge_version)
                if len(settled) < _PAGE:
                    break
                since, after = settled[-1].opened_at, settled[-1].id
        return found[:limit]

    def record_evidence(self, alias: str, version: int, evidence: Mapping[str, Any]) -> None:
        """Replace what is known about a version."""
        table = schema.releases
        values = {"evidence": dict(evidence), "updated_at": time.time()}
        with write(self._engine) as connection:
            one = matches(table, alias=alias, version=version)
            if not connection.execute(sa.update(table).where(one).values(**values)).rowcount:
                insert_or_ignore(connection, table, [{"alias": alias, "version": version, **values}])

    def evidence(self, alias: str, limit: int = 100) -> list[ReleaseEvidence]:
        """Return what is known about the versions of an alias, the newest version first."""
        table = schema.releases
        query = sa.select(table).where(table.c.alias == alias).order_by(table.c.version.desc()).limit(limit)
        return self._records(ReleaseEvidence, query)


def _page(connection: sa.Connection, alias: str, since: float, after: str, before: float) -> Sequence[Any]:
    """Return the counted trajectories from `since` on, in the order of their start."""
    runs = schema.trajectories
    columns = [runs.c[name] for name in ("id", "version", "state", "opened_at", "last_active_at", "group_id",
                                         "drop_reason", "draw")]  # fmt: skip
    later = sa.or_(runs.c.opened_at > since, runs.c.id > after)
    query = (
        sa.select(*columns, schema.groups.c.state.label("group_state"))
        .outerjoin(schema.groups, schema.groups.c.id == runs.c.group_id)
        .where(runs.c.alias == alias, runs.c.opened_at >= since, runs.c.opened_at < before, later)
        .where(runs.c.counted, runs.c.purpose == "live")
        .order_by(runs.c.opened_at, runs.c.id)
        .limit(_PAGE)
    )
    return connection.execute(query).all()


def _settled(page: Iterable[Any], scores: Mapping[str, float], overdue: float, overdue_open: float) -> list[Any]:
    """Return the trajectories before the first one that is not settled; `overdue`: those that began by then are."""
    settled: list[Any] = []
    for row in page:
        is_scored = row.id in scores and row.group_state != GroupState.READY
        is_due = row.opened_at <= (overdue_open if row.state == TrajectoryState.OPEN else overdue)
        if not is_scored and row.state != TrajectoryState.DROPPED and not is_due:
            break
        settled.append(row)
    return settled


def _scores(connection: sa.Connection, names: Sequence[str], judge_version: str) -> dict[str, float]:
    """Return the latest score of each trajectory by this version of the judge."""
    table = schema.verdicts
    theirs = sa.and_(in_values(connection, table.c.trajectory_id, names), table.c.judge_version == judge_version)
    query = (
        sa.select(table.c.trajectory_id, table.c.score).where(theirs, table.c.score.is_not(None)).order_by(table.c.id)
    )
    return {row.trajectory_id: row.score for row in connection.execute(query)} if names else {}


def _outcomes(
    connection: sa.Connection, rows: Sequence[Any], scores: Mapping[str, float], judge_version: str
) -> list[ReleaseOutcome]:
    calls = _calls(connection, [row.id for row in rows])
    members = _members(connection, sorted({row.group_id for row in rows if row.group_id}))
    theirs = _scores(connection, [name for names in members.values() for name in names], judge_version)
    found: list[ReleaseOutcome] = []
    for row in rows:
        others = [name for name in members.get(row.group_id, ()) if name != row.id]
        count, failed = calls.get(row.id, (0, 0))
        found.append(
            ReleaseOutcome(
                trajectory_id=row.id,
                started_at=row.opened_at,
                seconds=None if row.state == TrajectoryState.OPEN else row.last_active_at - row.opened_at,
                version=row.version,
                shares={int(version): share for version, share in row.draw["shares"].items()},
                unit=row.draw["unit"],
                score=scores.get(row.id),
                group_scores=tuple(theirs[name] for name in others if name in theirs),
                finished=row.state != TrajectoryState.OPEN and row.drop_reason != DropReason.CUT_OFF,
                calls=count,
                failed_calls=failed,
            )
        )
    return found


def _calls(connection: sa.Connection, names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return the number of calls of each trajectory, and of those that failed."""
    table = schema.calls
    failed = sa.func.sum(sa.case((table.c.state.in_(_FAILED), 1), else_=0))
    query = sa.select(table.c.trajectory_id, sa.func.count(), failed).group_by(table.c.trajectory_id)
    query = query.where(in_values(connection, table.c.trajectory_id, names))
    return {name: (int(count), int(bad)) for name, count, bad in connection.execute(query)} if names else {}


def _members(connection: sa.Connection, groups: Sequence[str]) -> dict[str, list[str]]:
    runs = schema.trajectories
    query = sa.select(runs.c.group_id, runs.c.id).where(in_values(connection, runs.c.group_id, groups))
    members: dict[str, list[str]] = {}
    for group_id, name in connection.execute(query.order_by(runs.c.id)) if groups else ():
        members.setdefault(group_id, []).append(name)
    return members
