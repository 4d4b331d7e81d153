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
from ratchet.store.db.engine import write
from ratchet.store.db.verbs import MAX_PAGE, Verbs, chunks, matches
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
    states_before,
)

# Tasks: the rows of task sets with rollouts, which judges and reports find by id.
#
# The reader of a task set derives the id of a task from its content.


class TaskRows(Verbs):
    def register(self, rows: Iterable[TaskRow]) -> None:
        """Store tasks; known ids are ignored. Raises InvalidRecord."""
        remaining = iter(rows)
        while some := [_checked(row) for row in islice(remaining, MAX_IN_VALUES)]:
            with write(self._engine) as connection:
                insert_or_ignore(connection, schema.tasks, some)

    def get(self, task_id: str) -> TaskRow | None:
        """Return a task; None if it is unknown."""
        return next(iter(self._records(TaskRow, sa.select(schema.tasks).where(schema.tasks.c.id == task_id))), None)


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


class Tunings(Verbs):
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
        self._change(sa.insert(schema.tunings).values(**msgspec.structs.asdict(tuning)))
        return tuning

    def update(self, tuning_id: str, result: Mapping[str, Any]) -> None:
        """Store the progress of a run. Raises RecordNotFound, and InvalidTransition if it is not running."""
        with write(self._engine) as connection:
            _change(connection, tuning_id, TuningState.RUNNING, result=dict(result))

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
            _change(connection, tuning_id, TuningState.RUNNING, state=new, error=error, ended_at=time.time(), **changes)
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
            _change(connection, tuning_id, state, state=TuningState.RUNNING, error=None, ended_at=None)
            abandon(connection, tuning_id)
        return self.get(tuning_id)

    def get(self, tuning_id: str) -> Tuning:
        """Return a run. Raises RecordNotFound."""
        return self._one(
            Tuning, sa.select(schema.tunings).where(schema.tunings.c.id == tuning_id), _NO_TUNING.format(tuning_id)
        )

    def page(
        self, kind: str | None = None, limit: int = 100, before: str | None = None, state: str | None = None
    ) -> list[Tuning]:
        """Return at most `limit` runs older than the id `before`, newest first; the doctor's only with that `kind`."""
        table = schema.tunings
        chosen = table.c.kind == kind if kind else table.c.kind != TuningKind.DOCTOR
        query = sa.select(table).where(chosen, matches(table, state=state or None)).order_by(table.c.id.desc())
        query = query.where(table.c.id < before) if before else query
        return self._records(Tuning, query.limit(min(limit, MAX_PAGE)))

    def led(self) -> set[str]:
        """Return the ids of the runs that a process runs now; any other run in progress was interrupted."""
        return {one.name.removeprefix(RUN_LEASE) for one in Leases(self._engine).holders(RUN_LEASE)}


def _change(connection: sa.Connection, tuning_id: str, old: TuningState, **values: Any) -> None:
    table = schema.tunings
    if connection.execute(sa.update(table).where(matches(table, id=tuning_id, state=old)).values(**values)).rowcount:
        return
    state = connection.scalar(sa.select(table.c.state).where(table.c.id == tuning_id))
    if state is None:
        raise RecordNotFound(_NO_TUNING.format(tuning_id))
    raise InvalidTransition(f"tuning {tuning_id} is {state} by now, not {old}")


def is_rollout_in_progress(trajectory_id: sa.ColumnElement[str]) -> sa.ColumnElement[bool]:
    """Return the condition that a trajectory is a planned rollout of a running tuning."""
    return sa.exists().where(
        schema.rollouts.c.id == trajectory_id,
        matches(schema.rollouts, state=RolloutState.PLANNED),
        schema.tunings.c.id == schema.rollouts.c.tuning_id,
        matches(schema.tunings, state=TuningState.RUNNING),
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


class Rollouts(Verbs):
    def plan(self, planned: Sequence[Rollout]) -> None:
        """Store planned rollouts; known ids are ignored."""
        for rows in chunks([_truncate(_row(rollout)) for rollout in planned]):
            with write(self._engine) as connection:
                insert_or_ignore(connection, schema.rollouts, rows)

    def score(self, rollout_id: str, score: float | None, judge: str, judge_failure: str | None = None) -> Rollout:
        """Store a judge's score or failure, in place of an earlier one. Raises RecordNotFound."""
        if (score is None) == (judge_failure is None):
            raise InvalidTransition(f"rollout {rollout_id}: a judge gives either a score or a failure")
        values = _truncate({"score": score, "judge": judge, "judge_failure": judge_failure})
        self._change(sa.update(schema.rollouts).where(schema.rollouts.c.id == rollout_id).values(**values))
        return self.get(rollout_id)

    def count_tokens(self, rollout_ids: Sequence[str]) -> None:
        """Store the token counts of these rollouts, from the calls shipped so far."""
        sums = {name: _summed(schema.calls.c[name]) for name in ("prompt_tokens", "completion_tokens")}
        for names in chunks(rollout_ids):
            self._change(sa.update(schema.rollouts).where(schema.rollouts.c.id.in_(names)).values(**sums))

    def get(self, rollout_id: str) -> Rollout:
        """Return a rollout. Raises RecordNotFound."""
        query = sa.select(schema.rollouts).where(schema.rollouts.c.id == rollout_id)
        return self._one(Rollout, query, f"no rollout {rollout_id}")

    def of_trajectories(self, trajectory_ids: Sequence[str]) -> dict[str, Rollout]:
        """Return the rollouts among these trajectories, by id."""
        return {found.id: found for found in self._select(schema.rollouts.c.id.in_(trajectory_ids))}

    def abandoned(self, trajectory_ids: Sequence[str]) -> set[str]:
        """Return the trajectories of abandoned rollouts, including their successors."""
        origins = {name: name.partition("~")[0] for name in trajectory_ids}
        table = schema.rollouts
        found: set[str] = set()
        for names in chunks(sorted(set(origins.values()))):
            mine = matches(table, id=names, state=RolloutState.ABANDONED)
            found |= set(self._values(sa.select(table.c.id).where(mine)))
        return {name for name, origin in origins.items() if origin in found}

    def of_tuning(self, tuning_id: str, candidate: str | None = None, *, responses: bool = False) -> list[Rollout]:
        """Return the rollouts of a tuning, or of one of its candidates, in order of planning.

        Responses, which may have megabytes, are left out unless `responses` is True.
        """
        return self._select(matches(schema.rollouts, tuning_id=tuning_id, candidate=candidate), responses)

    def training_outcomes(self, tuning_id: str, candidate: str) -> dict[str, int]:
        """Return how many trajectories of a candidate's rollouts have each drop reason, or else each state."""
        table, runs = schema.rollouts, schema.trajectories
        outcome = sa.func.coalesce(runs.c.drop_reason, runs.c.state)
        query = sa.select(outcome, sa.func.count()).select_from(table.join(runs, runs.c.id == table.c.id))
        query = query.where(matches(table, tuning_id=tuning_id, candidate=candidate)).group_by(outcome)
        return {str(name): int(count) for name, count in self._rows(query)}

    def awaited_versions(self, alias: str, since: float) -> set[int]:
        """Return the versions of an alias that rollouts planned since then still need."""
        table = schema.rollouts
        planned = (matches(table, state=RolloutState.PLANNED), table.c.planned_at > since, table.c.model.is_not(None))
        found = [
            str(name).rpartition("@") for name in self._values(sa.select(table.c.model).distinct().where(*planned))
        ]
        return {int(version) for name, _, version in found if name == alias and version.isdecimal()}

    def end_all(self, over: Sequence[Rollout]) -> None:
        """Store the ends of rollouts in one transaction, all or none.

        Raises InvalidTransition if one is not planned any more.
        """
        with write(self._engine) as connection:
            for rollout in over:
                before = states_before(ROLLOUT_TRANSITIONS, rollout.state)
                mine = matches(schema.rollouts, id=rollout.id, state=before)
                values = _truncate({name: _row(rollout)[name] for name in _ENDS})
                if not connection.execute(sa.update(schema.rollouts).where(mine).values(**values)).rowcount:
                    raise InvalidTransition(f"rollout {rollout.id} is unknown, or was ended by another process")

    def _select(self, where: sa.ColumnElement[bool], responses: bool = True) -> list[Rollout]:
        columns = [
            sa.null().label(c.name) if c is schema.rollouts.c.response and not responses else c
            for c in schema.rollouts.c
        ]
        query = sa.select(*columns).where(where).order_by(schema.rollouts.c.planned_at, schema.rollouts.c.id)
        return self._records(Rollout, query)


def abandon(connection: sa.Connection, tuning_id: str) -> None:
    """Abandon the planned rollouts of a run."""
    planned = sa.update(schema.rollouts).where(
        matches(schema.rollouts, tuning_id=tuning_id, state=RolloutState.PLANNED)
    )
    connection.execute(planned.values(state=RolloutState.ABANDONED, ended_at=time.time()))


def workflow_result_of(connection: sa.Connection, trajectory_id: str) -> tuple[str | None, WorkflowResult | None]:
    """Return the task and the workflow result of a trajectory's rollout; (None, None) if it has none."""
    query = sa.select(schema.rollouts).where(schema.rollouts.c.id == trajectory_id)
    row = connection.execute(query).one_or_none()
    return (None, None) if row is None else (row.task_id, row_to(WorkflowResult, row))


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
    table = schema.rollouts
    texts = {name: sa.case((table.c[name].is_not(None), ERASED), else_=None) for name in ("failure", "judge_failure")}
    connection.execute(sa.update(table).where(table.c.id.in_(trajectory_ids)).values(response=None, **texts))


def _row(rollout: Rollout) -> dict[str, Any]:
    return msgspec.structs.asdict(rollout) | {"scenario": dict(rollout.scenario), "metrics": dict(rollout.metrics)}
