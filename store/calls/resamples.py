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
from ratchet.store.db.engine import write
from ratchet.store.db.verbs import CachedCount, Verbs, matches
from ratchet.store.errors import InvalidTransition
from ratchet.store.records import RESAMPLE, Record, Resample, Trajectory
from ratchet.store.states import FINISH, RESAMPLE_TRANSITIONS, ResampleState, TrajectoryState, states_before


class ResampleCount(Record, frozen=True):
    """Number of resamples and of their tokens."""

    count: int = 0
    tokens: int = 0


class Resamples(Verbs):
    def __init__(self, engine: sa.Engine) -> None:
        super().__init__(engine)
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
        query = sa.select(schema.resamples).where(schema.resamples.c.id == resample_id)
        return self._one(Resample, query, f"no resample {resample_id}")

    def pending(self, alias: str, originals: Collection[str] | None = None) -> list[Resample]:
        """Return the resamples whose original waits for a group, ordered by original.

        `originals` None reads every resample of the alias.
        """
        trajectories = schema.trajectories
        chosen = {"alias": alias} if originals is None else {"original_id": list(originals)}
        query = (
            sa.select(schema.resamples)
            .join(trajectories, trajectories.c.id == schema.resamples.c.original_id)
            .where(matches(schema.resamples, **chosen), trajectories.c.state == TrajectoryState.SEALED)
            .order_by(schema.resamples.c.original_id, schema.resamples.c.number)
        )
        return self._records(Resample, query)

    def originals_of(self, resample_ids: Sequence[str]) -> dict[str, str]:
        """Return the original of each resample; unknown and deleted ones are left out."""
        table = schema.resamples
        query = sa.select(table.c.id, table.c.original_id).where(table.c.id.in_(list(resample_ids)))
        return {row.id: row.original_id for row in self._rows(query)}

    def sealed_of(self, original_id: str) -> list[str]:
        """Return the resamples of an original whose trajectories are sealed, and so complete in the store."""
        trajectories = schema.trajectories
        query = (
            sa.select(trajectories.c.id)
            .join(schema.resamples, schema.resamples.c.id == trajectories.c.id)
            .order_by(schema.resamples.c.number)
        )
        mine = (schema.resamples.c.original_id == original_id, trajectories.c.state == TrajectoryState.SEALED)
        return self._values(query.where(*mine))

    def usage_since(self, alias: str, since: float) -> ResampleCount:
        """Return the number of resamples requested since then (Unix seconds), and their tokens (estimates if open)."""
        columns = (sa.func.count(), sa.func.coalesce(sa.func.sum(schema.resamples.c.tokens), 0))
        query = sa.select(*columns).where(schema.resamples.c.alias == alias, schema.resamples.c.requested_at > since)
        ((count, tokens),) = self._rows(query)
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
        mine = matches(trajectories, alias=alias, state=TrajectoryState.OPEN, purpose=RESAMPLE)
        sealed = sa.update(trajectories).where(mine, over)
        self._change(sealed.values(state=TrajectoryState.SEALED, sealed_at=shipped_until, sealed_by=FINISH))

    def _count(self) -> dict[tuple[str, ResampleState], ResampleCount]:
        table = schema.resamples
        sums = sa.select(table.c.alias, table.c.state, sa.func.count(), sa.func.sum(table.c.tokens))
        return {
            (alias, ResampleState(state)): ResampleCount(count=count, tokens=tokens)
            for alias, state, count, tokens in self._rows(sums.group_by(table.c.alias, table.c.state))
        }

    def _move(self, resample_id: str, state: ResampleState, **values: Any) -> None:
        table = schema.resamples
        mine = matches(table, id=resample_id, state=states_before(RESAMPLE_TRANSITIONS, state))
        if not self._change(sa.update(table).where(mine).values(state=state, **truncate_row(table, values))):
            raise InvalidTransition(
                f"resample {resample_id} is {self.get(resample_id).state} and cannot become {state}"
            )
