"""Checks that the states of trajectories, groups, verdicts and rounds agree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.states import GroupState, RoundState, TrajectoryState
from ratchet.store.verify.violation import Page, Violation, existing_values

_DROP = "delete it with `ratchet store delete`, or restore the store from a backup"
_MEMBERS = {
    GroupState.READY: TrajectoryState.GROUPED,
    GroupState.JUDGED: TrajectoryState.GROUPED,
    GroupState.TRAINED: TrajectoryState.TRAINED,
    GroupState.DROPPED: TrajectoryState.DROPPED,
}


def check_trajectories(connection: sa.Connection, page: Page) -> Iterator[Violation]:
    """Check that trajectories have calls, and the seal time, group and committed round of their state."""
    rounds, groups, calls = schema.rounds, schema.groups, schema.calls
    with_calls = existing_values(connection, calls.c.trajectory_id, {row.id for row in page})
    group_ids = existing_values(connection, groups.c.id, {row.group_id for row in page if row.group_id})
    wanted = sorted({row.round_id for row in page if row.round_id})
    query = sa.select(rounds.c.id).where(rounds.c.id.in_(wanted), rounds.c.state == RoundState.COMMITTED)
    committed = set(connection.scalars(query))
    for row in page:
        for problem in _problems(row, with_calls, group_ids, committed):
            yield Violation(row=f"trajectory {row.id}", problem=problem, remedy=_DROP)


def _problems(row: Any, with_calls: set[str], groups: set[str], committed: set[str]) -> Iterator[str]:
    if row.id not in with_calls:
        yield "it has no call"
    if (row.state == TrajectoryState.OPEN) != (row.sealed_at is None):
        yield f"it is {row.state} and {'was' if row.sealed_at is not None else 'was never'} sealed"
    if row.state in (TrajectoryState.GROUPED, TrajectoryState.TRAINED) and row.group_id not in groups:
        yield f"it is {row.state} and its group {row.group_id} is missing"
    if row.state == TrajectoryState.TRAINED and row.round_id not in committed:
        yield f"its round {row.round_id} is not committed: it may be trained a second time"


def check_groups(connection: sa.Connection, page: Page) -> Iterator[Violation]:
    """Check that group members have the state of their group, and those of a judged group a score."""
    trajectories, verdicts = schema.trajectories, schema.verdicts
    members: defaultdict[str, list[Any]] = defaultdict(list)
    columns = sa.select(trajectories.c.id, trajectories.c.group_id, trajectories.c.state, trajectories.c.alias)
    for run in connection.execute(columns.where(trajectories.c.group_id.in_([row.id for row in page]))):
        members[run.group_id].append(run)
    judged = [row.id for row in page if row.state in (GroupState.JUDGED, GroupState.TRAINED)]
    names = [run.id for group in judged for run in members[group]]
    scored = sa.select(verdicts.c.trajectory_id).where(
        verdicts.c.trajectory_id.in_(names), verdicts.c.score.is_not(None)
    )
    with_score = set(connection.scalars(scored))
    for row in page:
        name = f"group {row.id}"
        if not members[row.id]:
            yield Violation(row=name, problem="it has no member", remedy="delete the row; nothing needs it")
        for run in members[row.id]:
            if run.state != _MEMBERS[GroupState(row.state)] or run.alias != row.alias:
                problem = f"it is {row.state} of {row.alias}, its member {run.id} is {run.state} of {run.alias}"
                yield Violation(row=name, problem=problem, remedy=_DROP)
            if row.id in judged and run.id not in with_score:
                problem = f"it is {row.state}, and no verdict scores its member {run.id}"
                yield Violation(row=name, problem=problem, remedy=_DROP)


def check_verdicts(connection: sa.Connection, page: Page) -> Iterator[Violation]:
    """Check that verdicts belong to an existing trajectory and to its group."""
    trajectories, judge_requests = schema.trajectories, schema.judge_requests
    wanted = sorted({row.trajectory_id for row in page})
    query = sa.select(trajectories.c.id, trajectories.c.group_id).where(trajectories.c.id.in_(wanted))
    groups = {row.id: row.group_id for row in connection.execute(query)}
    requests = existing_values(
        connection, judge_requests.c.id, {row.judge_request_id for row in page if row.judge_request_id}
    )
    remedy = "delete the verdict, or restore what it names from a backup"
    for row in page:
        name = f"verdict {row.id}"
        if row.trajectory_id not in groups:
            problem = f"its trajectory {row.trajectory_id} is missing"
            yield Violation(row=name, problem=problem, remedy=remedy)
        elif row.group_id is not None and groups[row.trajectory_id] != row.group_id:
            problem = f"it is of group {row.group_id}, its trajectory is of {groups[row.trajectory_id]}"
            yield Violation(row=name, problem=problem, remedy=remedy)
        if row.judge_request_id and row.judge_request_id not in requests:
            yield Violation(row=name, problem=f"its judge request {row.judge_request_id} is missing", remedy=remedy)


def check_rounds(connection: sa.Connection, page: Page) -> Iterator[Violation]:
    """Check that committed rounds and their versions name each other."""
    table = schema.policies
    query = sa.select(table.c.alias, table.c.version, table.c.round_id)
    made = {row.round_id: (row.alias, row.version) for row in connection.execute(query) if row.round_id}
    remedy = "restore the table policies from a backup; without the row the version cannot be served"
    for row in page:
        if row.state == RoundState.COMMITTED and made.get(row.id) != (row.alias, row.to_version):
            problem = f"it is committed, and policy {row.alias}@{row.to_version} does not name it"
            yield Violation(row=f"round {row.id}", problem=problem, remedy=remedy)
