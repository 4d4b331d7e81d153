"""Groups of trajectories and their verdicts, from forming to training or a drop with a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from ratchet.store.calls.trajectories import drop as drop_trajectories
from ratchet.store.db import schema
from ratchet.store.db.bulk import truncate_row
from ratchet.store.db.engine import read, write
from ratchet.store.db.verbs import MAX_PAGE, Verbs, chunks, matches
from ratchet.store.errors import InvalidTransition, RecordNotFound
from ratchet.store.ids import new_id
from ratchet.store.records import (
    GATHERED,
    RESAMPLE,
    Group,
    JudgeRequest,
    PastScore,
    Tally,
    TeacherScore,
    Verdict,
    cohort_of,
    family_of,
    row_to,
)
from ratchet.store.states import FINISH, GROUP_TRANSITIONS, GroupState, PolicyState, TrajectoryState, check_transition
from ratchet.store.statistics import Sums
from ratchet.store.training.rounds import read_teacher_scores, replace_teacher_scores

_UNTRAINED_GROUPS = (GroupState.READY, GroupState.JUDGED)  # wait for a judge or a round
_UNTRAINED_TRAJECTORIES = (TrajectoryState.SEALED, TrajectoryState.GROUPED)  # wait for a group or a round


def _drop_members(
    connection: sa.Connection, theirs: sa.ColumnElement[bool], of_group: sa.ColumnElement[bool], reason: str
) -> int:
    """Drop these trajectories if they were not trained, and then their groups if nothing is left of them."""
    groups, trajectories = schema.groups, schema.trajectories
    gone = {"state": TrajectoryState.DROPPED, "drop_reason": reason}
    untrained = sa.update(trajectories).where(theirs, trajectories.c.state.in_(_UNTRAINED_TRAJECTORIES))
    dropped = connection.execute(untrained.values(**gone)).rowcount
    if dropped:
        left = sa.exists().where(
            trajectories.c.group_id == groups.c.id, trajectories.c.state != TrajectoryState.DROPPED
        )
        emptied = sa.update(groups).where(of_group, groups.c.state.in_(_UNTRAINED_GROUPS), ~left)
        connection.execute(emptied.values(state=GroupState.DROPPED, drop_reason=reason))
    return dropped


def _drop_untrained(connection: sa.Connection, group_ids: Sequence[str], reason: str) -> int:
    """Drop the untrained ones of these groups, with their members; return their number."""
    groups, trajectories = schema.groups, schema.trajectories
    open_ones = sa.update(groups).where(matches(groups, id=group_ids, state=_UNTRAINED_GROUPS)).returning(groups.c.id)
    dropped = list(connection.scalars(open_ones.values(state=GroupState.DROPPED, drop_reason=reason)))
    grouped = matches(trajectories, group_id=dropped, state=TrajectoryState.GROUPED)
    connection.execute(sa.update(trajectories).where(grouped).values(state=TrajectoryState.DROPPED, drop_reason=reason))
    return len(dropped)


_UNGROUPED = (TrajectoryState.OPEN, TrajectoryState.SEALED)


def _take(connection: sa.Connection, alias: str, group: str, members: Sequence[str], now: float) -> None:
    """Seal the members that are open, and put all of them into the group."""
    trajectories = schema.trajectories
    mine = matches(trajectories, id=members, alias=alias, purpose=GATHERED, state=_UNGROUPED)
    sealed_at = sa.func.coalesce(trajectories.c.sealed_at, now)
    grouped = {"state": TrajectoryState.GROUPED, "group_id": group, "sealed_at": sealed_at, "sealed_by": FINISH}
    count = connection.execute(sa.update(trajectories).where(mine).values(**grouped)).rowcount
    if count != len(members):
        raise InvalidTransition(
            f"{len(members) - count} of {len(members)} members are no gathered trajectories of {alias}, or were "
            "trained or dropped"
        )


def add_verdicts(
    connection: sa.Connection, verdicts: Sequence[Verdict], judge_requests: Sequence[JudgeRequest]
) -> None:
    """Add verdicts, and the requests of judges behind them, in the caller's transaction."""
    if judge_requests:
        requests = [truncate_row(schema.judge_requests, msgspec.structs.asdict(one)) for one in judge_requests]
        connection.execute(sa.insert(schema.judge_requests), requests)
    rows: list[dict[str, Any]] = [
        truncate_row(schema.verdicts, msgspec.structs.asdict(verdict)) | {"components": dict(verdict.components)}
        for verdict in verdicts
    ]
    if rows:
        connection.execute(sa.insert(schema.verdicts), rows)


# Groups are formed of sealed trajectories, judged, then trained or dropped with a reason. Those that come with their
# scores are trained on request.
#
# Guarantees: a trajectory joins one group, in one transaction; all groups of a request are formed, scored and ready for
# a round in one transaction, or none; verdicts are only added. A drop is one transaction; groups that another process
# changed meanwhile are left alone.


class Groups(Verbs):
    """Operations on groups and verdicts."""

    def create(self, key: str, alias: str, members: Sequence[str], now: float) -> Group:
        """Form a group of sealed trajectories. Raises InvalidTransition if one of them is not sealed any more."""
        values: dict[str, Any] = {
            "id": new_id("grp"),
            "key": key,
            "alias": alias,
            "state": GroupState.READY,
            "formed_at": now,
        }
        sealed = sa.update(schema.trajectories).where(
            matches(schema.trajectories, id=members, state=TrajectoryState.SEALED)
        )
        with write(self._engine) as connection:
            connection.execute(sa.insert(schema.groups).values(**values))
            grouped = sealed.values(state=TrajectoryState.GROUPED, group_id=values["id"])
            if (count := connection.execute(grouped).rowcount) != len(members):
                raise InvalidTransition(f"{len(members) - count} of {len(members)} members are not sealed")
        return Group(**values, members=tuple(members), initial_size=len(members))

    def create_scored(self, alias: str, groups: Mapping[str, Sequence[Verdict]], now: float) -> list[str]:
        """Form groups of gathered trajectories by key, each with the verdicts of its members; return their ids.

        They wait for a round. Raises InvalidTransition if a member is not a gathered trajectory of the alias, or was
        trained or dropped; then nothing is written.
        """
        created: list[str] = []
        with write(self._engine) as connection:
            for key, verdicts in groups.items():
                group = new_id("grp")
                values = {"id": group, "key": key, "alias": alias, "state": GroupState.JUDGED, "formed_at": now}
                connection.execute(sa.insert(schema.groups).values(**values))
                _take(connection, alias, group, [one.trajectory_id for one in verdicts], now)
                add_verdicts(connection, [msgspec.structs.replace(one, group_id=group) for one in verdicts], ())
                created.append(group)
        return created

    def count_gathered(self) -> int:
        """Return the number of sealed trajectories that are grouped and trained on request only."""
        table = schema.trajectories
        waiting = matches(table, state=TrajectoryState.SEALED, purpose=GATHERED)
        return int(self._value(sa.select(sa.func.count()).select_from(table).where(waiting)))

    def drop_counts(self, alias: str | None = None) -> dict[str, int]:
        """Return the number of dropped groups, of one alias or of all, by reason."""
        groups = schema.groups
        query = sa.select(groups.c.drop_reason, sa.func.count()).group_by(groups.c.drop_reason)
        query = query.where(groups.c.drop_reason.is_not(None), matches(groups, alias=alias or None))
        return {str(reason): int(count) for reason, count in self._rows(query)}

    def drop_rejected(self, alias: str, reason: str) -> int:
        """Drop untrained trajectories of rejected versions; return their number.

        Groups continue without these members; empty groups are dropped too.
        """
        groups, policies = schema.groups, schema.policies
        rejected = sa.select(policies.c.version).where(matches(policies, alias=alias, state=PolicyState.REJECTED))
        theirs = sa.and_(schema.trajectories.c.alias == alias, schema.trajectories.c.version.in_(rejected))
        with write(self._engine) as connection:
            return _drop_members(connection, theirs, groups.c.alias == alias, reason)

    def drop_members(self, trajectory_ids: Sequence[str], reason: str) -> int:
        """Drop those of these trajectories that were not trained yet; return their number.

        Groups that lose their last member are dropped too.
        """
        trajectories, dropped = schema.trajectories, 0
        for names in chunks(trajectory_ids):
            theirs = trajectories.c.id.in_(names)
            of_group = schema.groups.c.id.in_(sa.select(trajectories.c.group_id).where(theirs))
            with write(self._engine) as connection:
                dropped += _drop_members(connection, theirs, of_group, reason)
        return dropped

    def drop_stale(self, alias: str, version: int, reason: str, serving: Sequence[int] = ()) -> int:
        """Drop untrained groups of an alias with a member sampled before `version`; return their number.

        Members that were dropped before do not count. Those of a version that is `serving` do not either: once their
        group is judged, they alone are dropped.
        """
        groups, trajectories = schema.groups, schema.trajectories
        is_old = sa.and_(trajectories.c.version < version, trajectories.c.state == TrajectoryState.GROUPED)
        old = (
            sa.select(groups.c.id)
            .join(trajectories, trajectories.c.group_id == groups.c.id)
            .where(groups.c.alias == alias, groups.c.state.in_(_UNTRAINED_GROUPS), is_old)
            .where(trajectories.c.version.not_in(serving))
            .distinct()
        )
        judged = (
            sa.select(trajectories.c.id)
            .join(groups, trajectories.c.group_id == groups.c.id)
            .where(groups.c.alias == alias, groups.c.state == GroupState.JUDGED, is_old)
            .where(trajectories.c.version.in_(serving))
        )
        found, members = self._values(old), self._values(judged)
        self.drop_members(members, reason)
        if not found:
            return 0
        with write(self._engine) as connection:
            return sum(_drop_untrained(connection, some, reason) for some in chunks(found))

    def awaiting_verdict(self, alias: str, now: float, limit: int = 100, *, newest_first: bool = False) -> list[Group]:
        """Return an alias's groups that may be judged now, oldest or newest first."""
        groups = schema.groups
        due = sa.or_(groups.c.retry_at.is_(None), groups.c.retry_at <= now)
        waiting = matches(groups, alias=alias, state=GroupState.READY)
        return self._select(sa.and_(waiting, due), limit, newest_first)

    def awaiting_round(self, alias: str, limit: int = 100, *, newest_first: bool = False) -> list[Group]:
        """Return an alias's judged groups, which wait for a round, oldest or newest first."""
        return self._select(matches(schema.groups, alias=alias, state=GroupState.JUDGED), limit, newest_first)

    def record_verdicts(
        self,
        group_id: str,
        verdicts: Sequence[Verdict],
        judge_requests: Sequence[JudgeRequest] = (),
        drop_reason: str | None = None,
        dropped_members: Mapping[str, str] | None = None,
        teacher_scores: Sequence[TeacherScore] = (),
    ) -> None:
        """Add the verdicts of all members; the group becomes judged or, with a reason, dropped.

        The members in `dropped_members` are dropped with the reasons given there. `teacher_scores` replace earlier ones
        of the same trajectories. Raises InvalidTransition if a verdict is missing or another process changed the group;
        then nothing is written.
        """
        group, dropped_members = self.get(group_id), dropped_members or {}
        check_transition(GROUP_TRANSITIONS, group.state, GroupState.JUDGED, f"group {group_id}")
        scored = {verdict.trajectory_id for verdict in verdicts if verdict.score is not None}
        if not scored | set(dropped_members) >= set(group.members):
            raise InvalidTransition(f"group {group_id} has {len(group.members)} members, {len(scored)} of them scored")
        with write(self._engine) as connection:
            if drop_reason is None:  # first: a member may have been deleted
                _move(connection, group, GroupState.JUDGED)
            else:
                _move(connection, group, GroupState.DROPPED, drop_reason=drop_reason)
                drop_trajectories(
                    connection, [name for name in group.members if name not in dropped_members], drop_reason
                )
            for name, reason in dropped_members.items():
                drop_trajectories(connection, [name], reason)
            add_verdicts(connection, verdicts, judge_requests)
            replace_teacher_scores(connection, teacher_scores)

    def record_judge_failure(
        self,
        group_id: str,
        verdicts: Sequence[Verdict],
        retry_at: float,
        judge_requests: Sequence[JudgeRequest] = (),
        *,
        counts: bool = True,
    ) -> None:
        """Add the verdicts so far, including failures; the group stays ready and is judged again at `retry_at`.

        `counts`: it was an attempt of the judge. Raises InvalidTransition if the group is not ready any more.
        """
        groups = schema.groups
        with write(self._engine) as connection:
            ready = sa.update(groups).where(matches(groups, id=group_id, state=GroupState.READY))
            later = ready.values(failures=groups.c.failures + int(counts), retry_at=retry_at)
            if not connection.execute(later).rowcount:
                raise InvalidTransition(f"group {group_id} does not wait for a judge")
            add_verdicts(connection, verdicts, judge_requests)

    def replace_verdicts(self, verdicts: Sequence[Verdict], judge_requests: Sequence[JudgeRequest] = ()) -> None:
        """Add verdicts on trajectories that were judged or dropped before; their states stay."""
        with write(self._engine) as connection:
            add_verdicts(connection, verdicts, judge_requests)

    def record_judge_requests(self, judge_requests: Sequence[JudgeRequest]) -> None:
        """Store requests of a judge whose verdicts do not count."""
        if judge_requests:
            with write(self._engine) as connection:
                add_verdicts(connection, [], judge_requests)

    def drop(self, group_id: str, reason: str) -> None:
        """Drop a group and its members."""
        group = self.get(group_id)
        check_transition(GROUP_TRANSITIONS, group.state, GroupState.DROPPED, f"group {group_id}")
        with write(self._engine) as connection:
            _move(connection, group, GroupState.DROPPED, drop_reason=reason)
            drop_trajectories(connection, group.members, reason)

    def get(self, group_id: str) -> Group:
        """Return a group. Raises RecordNotFound."""
        for found in self._select(schema.groups.c.id == group_id, 1):
            return found
        raise RecordNotFound(f"no group {group_id}")

    def page(self, limit: int = 100, before: str | None = None, **chosen: str | None) -> list[Group]:
        """Return at most `limit` groups, newest first, older than the group id `before`.

        `chosen`: values by column (state, alias, drop_reason); None: any value.
        """
        older = schema.groups.c.id < before if before else sa.true()
        return self._select(sa.and_(older, matches(schema.groups, **chosen)), min(limit, MAX_PAGE), newest_first=True)

    def newly_dropped(self, alias: str, reason: str, limit: int) -> list[Group]:
        """Return the groups dropped for a reason since an alias's newest judged group, oldest first."""
        groups = schema.groups
        fine = matches(groups, alias=alias, state=(GroupState.JUDGED, GroupState.TRAINED))
        since = sa.select(sa.func.coalesce(sa.func.max(groups.c.id), "")).where(fine).scalar_subquery()
        mine = matches(groups, alias=alias, drop_reason=reason)
        return self._select(sa.and_(mine, groups.c.id > since), limit, newest_first=True)[::-1]

    def verdicts(self, trajectory_ids: Sequence[str]) -> dict[str, Verdict]:
        """Return the latest verdict with a score, by trajectory."""
        found = self._verdicts(schema.verdicts.c.score.is_not(None), trajectory_id=list(trajectory_ids))
        return {verdict.trajectory_id: verdict for verdict in found}

    def scores(self, trajectory_ids: Sequence[str]) -> dict[str, float]:
        """Return the latest score, by trajectory."""
        table = schema.verdicts
        scored = sa.and_(table.c.trajectory_id.in_(list(trajectory_ids)), table.c.score.is_not(None))
        query = sa.select(table.c.trajectory_id, table.c.score).where(scored).order_by(table.c.id)
        return {row.trajectory_id: row.score for row in self._rows(query)}

    def teacher_scores(self, trajectory_ids: Sequence[str]) -> dict[str, TeacherScore]:
        """Return what a teacher said last of each trajectory."""
        with read(self._engine) as connection:
            return read_teacher_scores(connection, trajectory_ids)

    def verdicts_of(self, trajectory_id: str) -> list[Verdict]:
        """Return all verdicts on a trajectory, including failures, oldest first."""
        return self._verdicts(trajectory_id=trajectory_id)

    def verdict_history(self, group_id: str) -> list[Verdict]:
        """Return all verdicts on a group, including failures, oldest first."""
        return self._verdicts(group_id=group_id)

    def _verdicts(self, *conditions: sa.ColumnElement[bool], **values: Any) -> list[Verdict]:
        table = schema.verdicts
        mine = matches(table, **values)
        return self._records(Verdict, sa.select(table).where(mine, *conditions).order_by(table.c.id))

    def judge_requests(self, group_id: str) -> list[JudgeRequest]:
        """Return the judge requests on a group, oldest first."""
        table = schema.judge_requests
        return self._records(JudgeRequest, sa.select(table).where(table.c.group_id == group_id).order_by(table.c.id))

    def newest_judge_version(self, alias: str) -> str | None:
        """Return the version of the judge of an alias's latest score on its traffic; None without scores."""
        trajectories, table = schema.trajectories, schema.verdicts
        query = (
            sa.select(table.c.judge_version)
            .join(trajectories, trajectories.c.id == table.c.trajectory_id)
            .where(trajectories.c.alias == alias, table.c.score.is_not(None), trajectories.c.purpose != GATHERED)
            .order_by(table.c.id.desc())
            .limit(1)
        )
        version: str | None = self._value(query)
        return version

    def past_scores(self, alias: str, judge_version: str, limit: int = 5000) -> list[PastScore]:
        """Return the newest scores of a judge's version on an alias's trajectories, oldest first.

        Only the latest score of each trajectory, and no scores of resamples, which are not traffic.
        """
        trajectories, table = schema.trajectories, schema.verdicts
        query = (
            _past_scores()
            .add_columns(table.c.id.label("verdict"))
            .where(trajectories.c.alias == alias, table.c.judge_version == judge_version, table.c.score.is_not(None))
            .where(trajectories.c.purpose != RESAMPLE)
            .order_by(table.c.id.desc())
            .limit(limit)
        )
        newest = {row.id: row for row in reversed(self._rows(query))}
        return [_past_score(row) for row in sorted(newest.values(), key=lambda row: row.verdict)]

    def score_tallies(self, alias: str, judge_version: str, limit: int = 100_000) -> list[Tally]:
        """Return the scores of `past_scores`, summed by version and task in the database."""
        trajectories, table = schema.trajectories, schema.verdicts
        by_judge = (trajectories.c.alias == alias, table.c.judge_version == judge_version, table.c.score.is_not(None))
        newest = (
            sa.select(table.c.id, table.c.trajectory_id)
            .join(trajectories, trajectories.c.id == table.c.trajectory_id)
            .where(*by_judge, trajectories.c.purpose != RESAMPLE)
            .order_by(table.c.id.desc())
            .limit(limit)
            .subquery()
        )
        latest = sa.select(sa.func.max(newest.c.id)).group_by(newest.c.trajectory_id)
        # The task identifies a cohort; without one, the prompt and the tools do.
        root = sa.case((trajectories.c.task.is_(None), trajectories.c.root_node), else_=None)
        tools = sa.case((trajectories.c.task.is_(None), trajectories.c.tools_hash), else_=None)
        score, by = table.c.score, (trajectories.c.version, trajectories.c.task, root, tools)
        sums = (sa.func.count(), sa.func.sum(score), sa.func.sum(score * score), sa.func.min(score), sa.func.max(score))
        query = (
            sa.select(*by, *sums)
            .join(trajectories, trajectories.c.id == table.c.trajectory_id)
            .where(table.c.id.in_(latest))
        )
        return [_tally(row) for row in self._rows(query.group_by(*by))]

    def rewards(self, alias: str, judge_version: str, version: int, since: float = 0.0) -> list[PastScore]:
        """Return the latest score of each live trajectory of a version since `since`, oldest first."""
        trajectories, table = schema.trajectories, schema.verdicts
        latest = (
            sa.select(sa.func.max(table.c.id))
            .join(trajectories, trajectories.c.id == table.c.trajectory_id)
            .where(trajectories.c.alias == alias, trajectories.c.version == version, trajectories.c.opened_at >= since)
            .where(trajectories.c.purpose == "live", table.c.judge_version == judge_version, table.c.score.is_not(None))
            .group_by(table.c.trajectory_id)
        )
        query = _past_scores().where(table.c.id.in_(latest)).order_by(table.c.id)
        return [_past_score(row) for row in self._rows(query)]

    def _select(self, where: sa.ColumnElement[bool], limit: int, newest_first: bool = False) -> list[Group]:
        groups, trajectories = schema.groups, schema.trajectories
        order = groups.c.id.desc() if newest_first else groups.c.id
        with read(self._engine) as connection:
            rows = connection.execute(sa.select(groups).where(where).order_by(order).limit(limit)).all()
            if not rows:
                return []
            members: dict[str, list[str]] = {}
            initial_size: Counter[str] = Counter()
            left = sa.or_(groups.c.state == GroupState.DROPPED, trajectories.c.state != TrajectoryState.DROPPED)
            named = (
                sa.select(trajectories.c.group_id, trajectories.c.id, left.label("left"))
                .join(groups, groups.c.id == trajectories.c.group_id)
                .where(trajectories.c.group_id.in_([row.id for row in rows]))
            )
            for group_id, name, is_left in connection.execute(named.order_by(trajectories.c.id)):
                initial_size[group_id] += 1
                if is_left:
                    members.setdefault(group_id, []).append(name)
        return [
            row_to(Group, row, members=tuple(members.get(row.id, ())), initial_size=initial_size[row.id])
            for row in rows
        ]


def _past_scores() -> sa.Select[Any]:
    trajectories, table = schema.trajectories, schema.verdicts
    columns = [trajectories.c[name] for name in ("id", "task", "root_node", "tools_hash", "version")]
    query = sa.select(*columns, table.c.score, table.c.judged_at)
    return query.join(trajectories, trajectories.c.id == table.c.trajectory_id)


def _past_score(row: Any) -> PastScore:
    family, cohort = family_of(row.task, row.tools_hash), cohort_of(row.task, row.root_node, row.tools_hash)
    return row_to(PastScore, row, trajectory_id=row.id, family=family, cohort=cohort)


def _tally(row: Any) -> Tally:
    version, task, root, tools, count, total, squares, least, largest = row
    return Tally(
        version=version, family=family_of(task, tools or ""), cohort=cohort_of(task, root or "", tools or ""),
        sums=Sums(count, total, squares), least=least, largest=largest,
    )  # fmt: skip


def _move(connection: sa.Connection, group: Group, state: GroupState, **values: str) -> None:
    groups = schema.groups
    unmoved = sa.update(groups).where(matches(groups, id=group.id, state=group.state))
    if not connection.execute(unmoved.values(state=state, **values)).rowcount:
        raise InvalidTransition(f"group {group.id} was moved by another process")
