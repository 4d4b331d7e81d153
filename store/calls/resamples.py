"""Resamples: further answers to the prompt of a recorded call.

Guarantees: the resamples of an original are planned once. Each is requested at most once, because the request is
recorded before it is sent; a killed trainer's requests are not repeated. A resample is deleted with its original. Its
trajectory has the same id and the purpose `resample`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import sqlalchemy as sa

from ratchet.store import ids
from ratchet.store.db import schema
from ratchet.store.db.bulk import insert_or_ignore, truncate_row
from ratchet.store.db.count_cache import CachedCount
from ratchet.store.db.engine import read, write
from ratchet.store.errors import InvalidTransition, RecordNotFound
from ratchet.store.records import RESAMPLE, Record, Resample, Trajectory, row_to
from ratchet.store.states import FINISH, RESAMPLE_TRANSITIONS, ResampleState, TrajectoryState, states_before


class ResampleCount(Record, frozen=True):
    """Number of resamples and of their tokens."""

    count: int = 0
    tokens: int = 0


class Resamples:
    """Operations on resamples."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._counts = CachedCount(self._count)

    def plan(self, original: Trajectory, count: int, tokens: int, now: float) -> None:
        """Plan `count` further answers. Raises InvalidTransition if they were planned before."""
        values = {"original_id": original.id, "alias": original.alias, "version": original.version, "tokens": tokens}
        planned = {"planned_at": now, "requested_at": None, "ended_at": None, "failure": None}
        rows = [
            {"id": ids.new_id(ids.RESAMPLE), "number": number, "state": ResampleState.PLANNED, **values, **planned}
            for number in range(count)
        ]
        with write(self._engine) as connection:
            known = sa.select(sa.func.count()).where(schema.resamples.c.original_id == original.id)
            if connection.scalar(known):
                raise InvalidTransition(f"the resamples of trajectory {original.id} were planned before")
            insert_or_ignore(connection, schema.resamples, rows)

    def mark_requested(self, resample_id: str, now: float) -> None:
        """Record that the request is about to be sent. Raises InvalidTransition if it is no longer planned."""
        self._move(resample_id, ResampleState.REQUESTED, requested_at=now)

    def mark_answered(self, resample_id: str, now: float, tokens: int) -> None:
        """Record that the answer is complete. Raises InvalidTransition if it has ended."""
        self._move(resample_id, ResampleState.ANSWERED, ended_at=now, tokens=tokens)

    def mark_failed(self, resample_id: str, now: float, failure: str) -> None:
        """Record why there is no answer. Raises InvalidTransition if it has ended."""
        self._move(resample_id, ResampleState.FAILED, ended_at=now, failure=failure)

    def get(self, resample_id: str) -> Resample:
        """Return a resample. Raises RecordNotFound."""
        with read(self._engine) as connection:
            row = connection.execute(
                sa.select(schema.resamples).where(schema.resamples.c.id == resample_id)
            ).one_or_none()
        if row is None:
            raise RecordNotFound(f"no resample {resample_id}")
        return row_to(Resample, row)

    def pending(self, alias: str, originals: Collection[str] | None = None) -> list[Resample]:
        """Return the resamples whose original waits for a group, ordered by original.

        `originals` None reads every resample of the alias.
        """
        trajectories = schema.trajectories
        mine = (
            schema.resamples.c.alias == alias
            if originals is None
            else schema.resamples.c.original_id.in_(list(originals))
        )
        query = (
            sa.select(schema.resamples)
            .join(trajectories, trajectories.c.id == schema.resamples.c.original_id)
            .where(mine, trajectories.c.state == TrajectoryState.SEALED)
            .order_by(schema.resamples.c.original_id, schema.resamples.c.number)
        )
        with read(self._engine) as connection:
            return [row_to(Resample, row) for row in connection.execute(query)]

    def originals_of(self, resample_ids: Sequence[str]) -> dict[str, str]:
        """Return the original of each resample; unknown and deleted ones are left out."""
        query = sa.select(schema.resamples.c.id, schema.resamples.c.original_id).where(
            schema.resamples.c.id.in_(list(resample_ids))
        )
        with read(self._engine) as connection:
            return {row.id: row.original_id for row in connection.execute(query)}

    def sealed_of(self, original_id: str) -> list[str]:
        """Return the resamples of an original whose trajectories are sealed, and so complete in the store."""
        trajectories = schema.trajectories
        query = (
            sa.select(trajectories.c.id)
            .join(schema.resamples, schema.resamples.c.id == trajectories.c.id)
            .order_by(schema.resamples.c.number)
        )
        mine = sa.and_(schema.resamples.c.original_id == original_id, trajectories.c.state == TrajectoryState.SEALED)
        with read(self._engine) as connection:
            return list(connection.scalars(query.where(mine)))

    def usage_since(self, alias: str, since: float) -> ResampleCount:
        """Return the number of resamples requested since then (Unix seconds), and their tokens (estimates if open)."""
        columns = (sa.func.count(), sa.func.coalesce(sa.func.sum(schema.resamples.c.tokens), 0))
        query = sa.select(*columns).where(schema.resamples.c.alias == alias, schema.resamples.c.requested_at > since)
        with read(self._engine) as connection:
            count, tokens = connection.execute(query).one()
        return ResampleCount(count=int(count), tokens=int(tokens))

    def counts(self, alias: str) -> dict[ResampleState, ResampleCount]:
        """Return the resamples and tokens of an alias by state; cached if there are many."""
        return {state: count for (whose, state), count in self._counts().items() if whose == alias}

    def seal_trajectories(self, alias: str, shipped_until: float) -> None:
        """Seal the trajectories of resamples that ended before `shipped_until`, when every proxy has shipped them."""
        trajectories = schema.trajectories
        over = sa.exists().where(
            schema.resamples.c.id == trajectories.c.id, schema.resamples.c.ended_at < shipped_until
        )
        mine = sa.and_(
            trajectories.c.alias == alias,
            trajectories.c.state == TrajectoryState.OPEN,
            trajectories.c.purpose == RESAMPLE,
        )
        values = {"state": TrajectoryState.SEALED, "sealed_at": shipped_until, "sealed_by": FINISH}
        with write(self._engine) as connection:
            connection.execute(sa.update(trajectories).where(mine, over).values(**values))

    def _count(self) -> dict[tuple[str, ResampleState], ResampleCount]:
        columns = (
            schema.resamples.c.alias,
            schema.resamples.c.state,
            sa.func.count(),
            sa.func.sum(schema.resamples.c.tokens),
        )
        query = sa.select(*columns).group_by(schema.resamples.c.alias, schema.resamples.c.state)
        with read(self._engine) as connection:
            return {
                (alias, ResampleState(state)): ResampleCount(count=count, tokens=tokens)
                for alias, state, count, tokens in connection.execute(query)
            }

    def _move(self, resample_id: str, state: ResampleState, **values: Any) -> None:
        mine = sa.and_(
            schema.resamples.c.id == resample_id,
            schema.resamples.c.state.in_(states_before(RESAMPLE_TRANSITIONS, state)),
        )
        with write(self._engine) as connection:
            moved = connection.execute(
                sa.update(schema.resamples).where(mine).values(state=state, **truncate_row(schema.resamples, values))
            )
        if not moved.rowcount:
            raise InvalidTransition(
                f"resample {resample_id} is {self.get(resample_id).state} and cannot become {state}"
            )
