"""Tunings: the runs of the tuner, what they were asked to do and what came of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.db.engine import read, write
from ratchet.store.errors import InvalidTransition, RecordNotFound
from ratchet.store.ids import new_id
from ratchet.store.records.base import row_to
from ratchet.store.records.tuning import Tuning
from ratchet.store.states import TUNING_TRANSITIONS, RolloutState, TuningKind, TuningState, check_transition
from ratchet.store.tuning.rollouts import abandon

_NO_TUNING = "no tuning {}; `ratchet tune runs` shows the ids"


class Tunings:
    """Operations on tunings."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def begin(self, kind: str, alias: str, config: Mapping[str, Any]) -> Tuning:
        """Record that a run begins."""
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
        """Record how far a running one is. Raises RecordNotFound, InvalidTransition if it does not run."""
        with write(self._engine) as connection:
            self._change(connection, tuning_id, TuningState.RUNNING, result=dict(result))

    def end(
        self, tuning_id: str, state: str, result: Mapping[str, Any] | None = None, error: str | None = None
    ) -> Tuning:
        """Record how a run ended; without a `result` its progress stays. Raises InvalidTransition,
        RecordNotFound.
        """
        new = TuningState(state)
        check_transition(TUNING_TRANSITIONS, self.get(tuning_id).state, new, f"tuning {tuning_id}")
        told = {} if result is None else {"result": dict(result)}
        if new is TuningState.FAILED:
            error = error or "no reason was given"
        error = None if error is None else error.replace("\0", "\ufffd")
        with write(self._engine) as connection:
            self._change(
                connection, tuning_id, TuningState.RUNNING, state=new, error=error, ended_at=time.time(), **told
            )
            abandon(connection, tuning_id)
        return self.get(tuning_id)

    def resume(self, tuning_id: str) -> Tuning:
        """Let a run go on that was stopped, failed or killed. Raises InvalidTransition, RecordNotFound.

        What it planned and never ended is abandoned: whoever was to make it is gone, or will find nobody who listens.
        """
        state = self.get(tuning_id).state
        if state is TuningState.DONE:
            raise InvalidTransition(f"tuning {tuning_id} is done: there is nothing to go on with")
        if state is not TuningState.RUNNING:
            check_transition(TUNING_TRANSITIONS, state, TuningState.RUNNING, f"tuning {tuning_id}")
        with write(self._engine) as connection:
            self._change(connection, tuning_id, state, state=TuningState.RUNNING, error=None, ended_at=None)
            abandon(connection, tuning_id)
        return self.get(tuning_id)

    def get(self, tuning_id: str) -> Tuning:
        """Return one. Raises RecordNotFound."""
        found = self._select(schema.tunings.c.id == tuning_id, 1)
        if not found:
            raise RecordNotFound(_NO_TUNING.format(tuning_id))
        return found[0]

    def page(
        self, kind: str | None = None, limit: int = 100, before: str | None = None, state: str | None = None
    ) -> list[Tuning]:
        """Return at most `limit`, newest first, older than the id `before`; what a doctor tried, only where asked."""
        where = [schema.tunings.c.kind == kind if kind else schema.tunings.c.kind != TuningKind.DOCTOR]
        where += [schema.tunings.c.state == state] if state else []
        where += [schema.tunings.c.id < before] if before else []
        return self._select(sa.and_(sa.true(), *where), min(limit, 1000))

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


def is_still_running(trajectory_id: sa.ColumnElement[str]) -> sa.ColumnElement[bool]:
    """Return whether a trajectory is a rollout whose workflow has not returned, of a run that goes on."""
    return sa.exists().where(
        schema.rollouts.c.id == trajectory_id,
        schema.rollouts.c.state == RolloutState.PLANNED,
        schema.tunings.c.id == schema.rollouts.c.tuning_id,
        schema.tunings.c.state == TuningState.RUNNING,
    )
