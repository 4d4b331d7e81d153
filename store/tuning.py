"""The tuner's records: tasks, runs, and the rollouts of their workflows."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec
import sqlalchemy as sa

from ratchet.store.coordination import Leases
from ratchet.store.db import schema
from ratchet.store.db.bulk import MAX_IN_VALUES, insert_or_ignore, truncate_row
from ratchet.store.db.engine import read, write
from ratchet.store.errors import InvalidRecord, InvalidTransition, RecordNotFound
from ratchet.store.ids import new_id
from ratchet.store.operation_records import Rollout, TaskRow, Tuning
from ratchet.store.records import WorkflowResult, row_to
from ratchet.store.states import (
    ROLLOUT_TRANSITIONS,
    TUNING_TRANSITIONS,
    RolloutState,
    TuningKind,
    TuningState,
    check_transition,
)

# Tasks: the rows of task sets with rollouts, which judges and reports find by id.
#
# The reader of a task set derives the id of a task from its content.


class TaskRows:
    """Operations on tasks."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def register(self, rows: Iterable[TaskRow]) -> None:
        """Store tasks; known ids are ignored. Raises InvalidRecord."""
        remaining = iter(rows)
        while some := [_checked(row) for row in islice(remaining, MAX_IN_VALUES)]:
            with write(self._engine) as connection:
                insert_or_ignore(connection, schema.tasks, some)

    def get(self, task_id: str) -> TaskRow | None:
        """Return a task; None if it is unknown."""
        with read(self._engine) as connection:
            row = connection.execute(sa.select(schema.tasks).where(schema.tasks.c.id == task_id)).one_or_none()
        return None if row is None else row_to(TaskRow, row)


def row_of(connection: sa.Connection, task_id: str | None) -> Mapping[str, Any] | None:
    """Return the row of a task key; None if it is unknown."""
    if task_id is None:
        return None
    row: Mapping[str, Any] | None = connection.scalar(
        sa.select(schema.tasks.c.content).where(schema.tasks.c.id == task_id)
    )
    return row


def _checked(task: TaskRow) -> dict[str, Any]:
    if not 0 < len(task.id) <= 256:
        raise InvalidRecord(f"the task id {task.id[:40]!r}... has {len(task.id)} characters: use 1 to 256")
    return {"id": task.id, "task_set": task.task_set, "split": task.split, "content": dict(task.content)}


# Tunings: the runs of the tuner, with their request, progress and result.

RUN_LEASE = "tuning:"  # and the run's id: the lease of the process that runs it
_NO_TUNING = "no tuning {}; `ratchet tune runs` shows the ids"


class Tunings:
    """Operations on tunings."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def begin(self, kind: str, alias: str, config: Mapping[str, Any]) -> Tuning:
        """Start a run."""
        tuning = Tuning(
            id=new_id("tun"),
            kind=TuningKind(kind),
            alias=alias,
            state=TuningState.RUNNING,
            config=dict(config),
            started_at=time.time(),
        )
        row = {name: getattr(tuning, name) for name in Tuning.__struct_fields__}
        with write(self._engine) as connection:
            connection.execute(sa.insert(schema.tunings).values(**row))
        return tuning

    def update(self, tuning_id: str, result: Mapping[str, Any]) -> None:
        """Store the progress of a run. Raises RecordNotFound, and InvalidTransition if it is not running."""
        with write(self._engine) as connection:
            self._change(connection, tuning_id, TuningState.RUNNING, result=dict(result))

    def end(
        self, tuning_id: str, state: str, result: Mapping[str, Any] | None = None, error: str | None = None
    ) -> Tuning:
        """End a run; without a `result`, its progress stays. Raises InvalidTransition, RecordNotFound."""
        new = TuningState(state)
        check_transition(TUNING_TRANSITIONS, self.get(tuning_id).state, new, f"tuning {tuning_id}")
        changes = {} if result is None else {"result": dict(result)}
        if new is TuningState.FAILED:
            error = error or "no reason was given"
        error = None if error is None else error.replace("\0", "\ufffd")
        with write(self._engine) as connection:
            self._change(
                connection, tuning_id, TuningState.RUNNING, state=new, error=error, ended_at=time.time(), **changes
            )
            abandon(connection, tuning_id)
        return self.get(tuning_id)

    def resume(self, tuning_id: str) -> Tuning:
        """Resume a run that was stopped, failed or killed. Raises InvalidTransition, RecordNotFound.

        Its planned rollouts without an end are abandoned.
        """
        state = self.get(tuning_id).state
        if state is TuningState.DONE:
            raise InvalidTransition(f"tuning {tuning_id} is done: there is nothing to resume")
        if state is not TuningState.RUNNING:
            check_transition(TUNING_TRANSITIONS, state, TuningState.RUNNING, f"tuning {tuning_id}")
        with write(self._engine) as connection:
            self._change(connection, tuning_id, state, state=TuningState.RUNNING, error=None, ended_at=None)
            abandon(connection, tuning_id)
        return self.get(tuning_id)

    def get(self, tuning_id: str) -> Tuning:
        """Return a run. Raises RecordNotFound."""
        found = self._select(schema.tunings.c.id == tuning_id, 1)
        if not found:
            raise RecordNotFound(_NO_TUNING.format(tuning_id))
        return found[0]

    def page(
        self, kind: str | None = None, limit: int = 100, before: str | None = None, state: str | None = None
    ) -> list[Tuning]:
        """Return at most `limit` runs older than the id `before`, newest first; the doctor's only with that `kind`."""
        where = [schema.tunings.c.kind == kind if kind else schema.tunings.c.kind != TuningKind.DOCTOR]
        where += [schema.tunings.c.state == state] if state else []
        where += [schema.tunings.c.id < before] if before else []
        return self._select(sa.and_(sa.true(), *where), min(limit, 1000))

    def led(self) -> set[str]:
        """Return the ids of the runs that a process runs now; any other run in progress was interrupted."""
        return {one.name.removeprefix(RUN_LEASE) for one in Leases(self._engine).holders(RUN_LEASE)}

    def _change(self, connection: sa.Connection, tuning_id: str, old: TuningState, **values: Any) -> None:
        mine = sa.and_(schema.tunings.c.id == tuning_id, schema.tunings.c.state == old)
        if connection.execute(sa.update(schema.tunings).where(mine).values(**values)).rowcount:
            return
        state = connection.scalar(sa.select(schema.tunings.c.state).where(schema.tunings.c.id == tuning_id))
        if state is None:
            raise RecordNotFound(_NO_TUNING.format(tuning_id))
        raise InvalidTransition(f"tuning {tuning_id} is {state} by now, not {old}")

    def _select(self, where: sa.ColumnElement[bool], limit: int) -> list[Tuning]:
        query = sa.select(schema.tunings).where(where).order_by(schema.tunings.c.id.desc()).limit(limit)
        with read(self._engine) as connection:
            return [row_to(Tuning, row) for row in connection.execute(query)]


def is_rollout_in_progress(trajectory_id: sa.ColumnElement[str]) -> sa.ColumnElement[bool]:
    """Return the condition that a trajectory is a planned rollout of a running tuning."""
    return sa.exists().where(
        schema.rollouts.c.id == trajectory_id,
        schema.rollouts.c.state == RolloutState.PLANNED,
        schema.tunings.c.id == schema.rollouts.c.tuning_id,
        schema.tunings.c.state == TuningState.RUNNING,
    )


# Rollouts: attempts of a workflow at tasks, stored before they start, so that the proxy knows their ids.
#
# Guarantees: a rollout's end is written once. A failed rollout is kept with its exception. A rollout whose run ended
# first is abandoned, not deleted, so that late calls still belong to it. A judge failure is never a number. Text of
# workflows and judges is truncated to its column.

# Columns that the end of a rollout sets.
_ENDS = (
    "state", "started_at", "ended_at", "failure", "response", "reward", "metrics", "prompt_tokens", "completion_tokens",
)  # fmt: skip
ERASED = "erased"  # in place of text that may quote a deleted trajectory


class Rollouts:
    """Operations on rollouts."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def plan(self, planned: Sequence[Rollout]) -> None:
        """Store planned rollouts; known ids are ignored."""
        rows = [_truncate(_row(rollout)) for rollout in planned]
        for start in range(0, len(rows), MAX_IN_VALUES):
            with write(self._engine) as connection:
                insert_or_ignore(connection, schema.rollouts, rows[start : start + MAX_IN_VALUES])

    def end(
        self,
        rollout_id: str,
        *,
        started_at: float,
        ended_at: float,
        response: str | None = None,
        reward: float | None = None,
        metrics: Mapping[str, float] | None = None,
        prompt_tokens: int = 0,
        completion_tokens: int = 0,
    ) -> Rollout:
        """Record that the workflow returned. Raises InvalidTransition if it has ended, RecordNotFound."""
        tokens = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
        result = {"response": response, "reward": reward, "metrics": dict(metrics or {})}
        times = {"started_at": started_at, "ended_at": ended_at}
        return self._end(rollout_id, RolloutState.ENDED, {**times, **result, **tokens})

    def fail(
        self,
        rollout_id: str,
        failure: str,
        ended_at: float,
        *,
        started_at: float | None = None,
        prompt_tokens: int = 0,
        completion_tokens: int = 0,
    ) -> Rollout:
        """Record the failure of the workflow. Raises InvalidTransition if it has ended, RecordNotFound."""
        tokens = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
        values = {"failure": failure, "started_at": started_at, "ended_at": ended_at}
        return self._end(rollout_id, RolloutState.FAILED, {**values, **tokens})

    def score(self, rollout_id: str, score: float | None, judge: str, judge_failure: str | None = None) -> Rollout:
        """Store a judge's score or failure, in place of an earlier one. Raises RecordNotFound."""
        if (score is None) == (judge_failure is None):
            raise InvalidTransition(f"rollout {rollout_id}: a judge gives either a score or a failure")
        values = _truncate({"score": score, "judge": judge, "judge_failure": judge_failure})
        with write(self._engine) as connection:
            connection.execute(sa.update(schema.rollouts).where(schema.rollouts.c.id == rollout_id).values(**values))
        return self.get(rollout_id)

    def count_tokens(self, rollout_ids: Sequence[str]) -> None:
        """Store the token counts of these rollouts, from the calls shipped so far."""
        sums = {name: _summed(schema.calls.c[name]) for name in ("prompt_tokens", "completion_tokens")}
        for start in range(0, len(rollout_ids), MAX_IN_VALUES):
            mine = schema.rollouts.c.id.in_(rollout_ids[start : start + MAX_IN_VALUES])
            with write(self._engine) as connection:
                connection.execute(sa.update(schema.rollouts).where(mine).values(**sums))

    def get(self, rollout_id: str) -> Rollout:
        """Return a rollout. Raises RecordNotFound."""
        found = self._select(schema.rollouts.c.id == rollout_id)
        if not found:
            raise RecordNotFound(f"no rollout {rollout_id}")
        return found[0]

    def of_trajectories(self, trajectory_ids: Sequence[str]) -> dict[str, Rollout]:
        """Return the rollouts among these trajectories, by id."""
        return {found.id: found for found in self._select(schema.rollouts.c.id.in_(trajectory_ids))}

    def abandoned(self, trajectory_ids: Sequence[str]) -> set[str]:
        """Return the trajectories of abandoned rollouts, including their successors."""
        origins = {name: name.partition("~")[0] for name in trajectory_ids}
        named = sorted(set(origins.values()))
        found: set[str] = set()
        for start in range(0, len(named), MAX_IN_VALUES):
            some = schema.rollouts.c.id.in_(named[start : start + MAX_IN_VALUES])
            query = sa.select(schema.rollouts.c.id).where(some, schema.rollouts.c.state == RolloutState.ABANDONED)
            with read(self._engine) as connection:
                found |= set(connection.scalars(query))
        return {name for name, origin in origins.items() if origin in found}

    def of_tuning(self, tuning_id: str, candidate: str | None = None, *, responses: bool = False) -> list[Rollout]:
        """Return the rollouts of a tuning, or of one of its candidates, in order of planning.

        Responses, which may have megabytes, are left out unless `responses` is True.
        """
        mine = schema.rollouts.c.tuning_id == tuning_id
        return self._select(
            mine if candidate is None else sa.and_(mine, schema.rollouts.c.candidate == candidate), responses
        )

    def training_outcomes(self, tuning_id: str, candidate: str) -> dict[str, int]:
        """Return how many trajectories of a candidate's rollouts have each drop reason, or else each state."""
        table, runs = schema.rollouts, schema.trajectories
        outcome = sa.func.coalesce(runs.c.drop_reason, runs.c.state)
        query = sa.select(outcome, sa.func.count()).select_from(table.join(runs, runs.c.id == table.c.id))
        query = query.where(table.c.tuning_id == tuning_id, table.c.candidate == candidate)
        with read(self._engine) as connection:
            return {str(name): int(count) for name, count in connection.execute(query.group_by(outcome))}

    def awaited_versions(self, alias: str, since: float) -> set[int]:
        """Return the versions of an alias that rollouts planned since then still need."""
        model = schema.rollouts.c.model
        query = sa.select(model).distinct()
        query = query.where(schema.rollouts.c.state == RolloutState.PLANNED, schema.rollouts.c.planned_at > since)
        with read(self._engine) as connection:
            found = [str(name).rpartition("@") for name in connection.scalars(query.where(model.is_not(None)))]
        return {int(version) for name, _, version in found if name == alias and version.isdecimal()}

    def end_all(self, over: Sequence[Rollout]) -> None:
        """Store the ends of rollouts in one transaction, all or none.

        Raises InvalidTransition if one is not planned any more.
        """
        with write(self._engine) as connection:
            for rollout in over:
                mine = sa.and_(schema.rollouts.c.id == rollout.id, schema.rollouts.c.state == RolloutState.PLANNED)
                values = _truncate({name: _row(rollout)[name] for name in _ENDS})
                if not connection.execute(sa.update(schema.rollouts).where(mine).values(**values)).rowcount:
                    raise InvalidTransition(f"rollout {rollout.id} is unknown, or was ended by another process")

    def _end(self, rollout_id: str, state: RolloutState, values: dict[str, Any]) -> Rollout:
        planned = self.get(rollout_id)
        check_transition(ROLLOUT_TRANSITIONS, planned.state, state, f"rollout {rollout_id}")
        self.end_all([msgspec.structs.replace(planned, state=state, **values)])
        return self.get(rollout_id)

    def _select(self, where: sa.ColumnElement[bool], responses: bool = True) -> list[Rollout]:
        columns = [
            sa.null().label(c.name) if c is schema.rollouts.c.response and not responses else c
            for c in schema.rollouts.c
        ]
        query = sa.select(*columns).where(where).order_by(schema.rollouts.c.planned_at, schema.rollouts.c.id)
        with read(self._engine) as connection:
            return [row_to(Rollout, row) for row in connection.execute(query)]


def abandon(connection: sa.Connection, tuning_id: str) -> None:
    """Abandon the planned rollouts of a run."""
    planned = sa.and_(schema.rollouts.c.tuning_id == tuning_id, schema.rollouts.c.state == RolloutState.PLANNED)
    gone = {"state": RolloutState.ABANDONED, "ended_at": time.time()}
    connection.execute(sa.update(schema.rollouts).where(planned).values(**gone))


def workflow_result_of(connection: sa.Connection, trajectory_id: str) -> tuple[str | None, WorkflowResult | None]:
    """Return the task and the workflow result of a trajectory's rollout; (None, None) if it has none."""
    columns = (
        schema.rollouts.c.task_id,
        schema.rollouts.c.response,
        schema.rollouts.c.reward,
        schema.rollouts.c.failure,
        schema.rollouts.c.tuning_id,
    )
    row = connection.execute(sa.select(*columns).where(schema.rollouts.c.id == trajectory_id)).one_or_none()
    if row is None:
        return None, None
    returned = WorkflowResult(response=row.response, reward=row.reward, failure=row.failure, tuning_id=row.tuning_id)
    return row.task_id, returned


def _truncate(values: dict[str, Any]) -> dict[str, Any]:
    """Return values that every database accepts; lone surrogates, which exceptions may quote, are replaced."""
    whole = {
        name: value.encode("utf-8", "replace").decode() if type(value) is str and not value.isascii() else value
        for name, value in values.items()
    }
    return truncate_row(schema.rollouts, whole)


def _summed(column: sa.ColumnElement[Any]) -> sa.ScalarSelect[Any]:
    mine = schema.calls.c.trajectory_id == schema.rollouts.c.id
    return sa.select(sa.func.coalesce(sa.func.sum(column), 0)).where(mine).scalar_subquery()


def erase_content(connection: sa.Connection, trajectory_ids: Sequence[str]) -> None:
    """Erase the content of deleted trajectories from their rollouts; the rows and scores stay."""
    texts = {
        "failure": _unless_null(schema.rollouts.c.failure),
        "judge_failure": _unless_null(schema.rollouts.c.judge_failure),
    }
    mine = schema.rollouts.c.id.in_(trajectory_ids)
    connection.execute(sa.update(schema.rollouts).where(mine).values(response=None, **texts))


def _unless_null(column: sa.Column[Any]) -> sa.ColumnElement[Any]:
    return sa.case((column.is_not(None), ERASED), else_=None)


def _row(rollout: Rollout) -> dict[str, Any]:
    row = {name: getattr(rollout, name) for name in Rollout.__struct_fields__}
    return row | {"scenario": dict(rollout.scenario), "metrics": dict(rollout.metrics)}
