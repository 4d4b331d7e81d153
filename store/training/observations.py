"""Observations: figures that the trainer needs after a restart, such as those of a second judge. Only added.

Guarantee: they contain no content of trajectories, so a deletion keeps them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.db.engine import read, write
from ratchet.store.records.base import Record, row_to


class Observation(Record, frozen=True):
    """An observation of a kind about a subject."""

    id: int
    alias: str
    kind: str
    subject: str
    content: Mapping[str, Any]
    recorded_at: float


class Observations:
    """Operations on observations."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def add(self, alias: str, kind: str, subject: str, content: Mapping[str, Any]) -> None:
        """Add an observation."""
        row = {"alias": alias, "kind": kind, "subject": subject, "content": dict(content), "recorded_at": time.time()}
        with write(self._engine) as connection:
            connection.execute(sa.insert(schema.observations).values(**row))

    def newest(self, alias: str, kind: str, limit: int) -> list[Observation]:
        """Return the newest `limit` observations of a kind, oldest first."""
        mine = sa.and_(schema.observations.c.alias == alias, schema.observations.c.kind == kind)
        query = sa.select(schema.observations).where(mine).order_by(schema.observations.c.id.desc()).limit(limit)
        with read(self._engine) as connection:
            rows = connection.execute(query).all()
        return [row_to(Observation, row) for row in reversed(rows)]

    def latest(self, alias: str, kind: str, limit: int = 1000) -> dict[str, Observation]:
        """Return the newest observation of each subject, among the newest `limit` of a kind."""
        return {found.subject: found for found in self.newest(alias, kind, limit)}
