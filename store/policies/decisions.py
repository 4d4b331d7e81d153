"""Decisions about policy versions, with their author and evidence. Only added.

The transaction that carries out a decision also records it (policies.py), so that every change of a version has one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.db.engine import read
from ratchet.store.records.base import Record, row_to
from ratchet.store.states import PolicyAction


class Decision(Record, frozen=True):
    """A decision about a version: its author, reason and evidence."""

    id: int
    alias: str
    version: int
    action: PolicyAction
    decided_by: str  # proof, release, tuner, or a person
    reason: str
    evidence: Mapping[str, Any]
    decided_at: float


class Decisions:
    """Operations on decisions."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def decisions_of(self, alias: str, version: int | None = None, limit: int = 100) -> list[Decision]:
        """Return the decisions about an alias, or about one version of it, newest first."""
        where = sa.and_(
            schema.decisions.c.alias == alias, sa.true() if version is None else schema.decisions.c.version == version
        )
        query = sa.select(schema.decisions).where(where).order_by(schema.decisions.c.id.desc()).limit(limit)
        with read(self._engine) as connection:
            return [row_to(Decision, row) for row in connection.execute(query)]

    def decisions_after(self, alias: str, decision_id: int, limit: int = 1000) -> list[Decision]:
        """Return the decisions about an alias after an id, oldest first; 0: from the first one."""
        where = sa.and_(schema.decisions.c.alias == alias, schema.decisions.c.id > decision_id)
        with read(self._engine) as connection:
            found = connection.execute(
                sa.select(schema.decisions).where(where).order_by(schema.decisions.c.id).limit(limit)
            )
            return [row_to(Decision, row) for row in found]

    def counts(self, alias: str) -> dict[PolicyAction, int]:
        """Return the number of decisions about an alias by action."""
        query = sa.select(schema.decisions.c.action, sa.func.count()).where(schema.decisions.c.alias == alias)
        with read(self._engine) as connection:
            return {PolicyAction(a): int(n) for a, n in connection.execute(query.group_by(schema.decisions.c.action))}

    def latest(self, alias: str | None = None) -> dict[tuple[str, int], Decision]:
        """Return the newest decision about each (alias, version)."""
        newest = sa.select(sa.func.max(schema.decisions.c.id)).group_by(
            schema.decisions.c.alias, schema.decisions.c.version
        )
        wanted = sa.and_(schema.decisions.c.id.in_(newest), schema.decisions.c.alias == alias if alias else sa.true())
        with read(self._engine) as connection:
            rows = connection.execute(sa.select(schema.decisions).where(wanted)).all()
        return {(row.alias, row.version): row_to(Decision, row) for row in rows}


def record_decision(
    connection: sa.Connection,
    alias: str,
    version: int,
    action: PolicyAction,
    by: str,
    reason: str,
    evidence: Mapping[str, Any],
) -> None:
    """Add a decision in the caller's transaction."""
    connection.execute(
        sa.insert(schema.decisions).values(
            alias=alias,
            version=version,
            action=action,
            decided_by=by,
            reason=reason,
            evidence=dict(evidence),
            decided_at=time.time(),
        )
    )
