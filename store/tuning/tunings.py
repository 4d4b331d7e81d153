"""Tunings: the runs of the tuner, with their request, progress and result."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from ratchet.store.coordination.leases import Leases
from ratchet.store.db import schema
from ratchet.store.db.engine import read, write
from ratchet.store.errors import InvalidTransition, RecordNotFound
from ratchet.store.ids import new_id
from ratchet.store.records.base import row_to
from ratchet.store.records.tuning import Tuning
from ratchet.store.states import TUNING_TRANSITIONS, RolloutState, TuningKind, TuningState, check_transition
from ratchet.store.tuning.rollouts import abandon

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
