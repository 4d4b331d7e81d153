"""Queries over policy versions: what is served, what waits for a person, one version or all."""

from __future__ import annotations

import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.db.engine import read
from ratchet.store.errors import InvalidTransition, RecordNotFound
from ratchet.store.records import BASE_VERSION, Policy
from ratchet.store.records.base import row_to
from ratchet.store.states import SERVING, PolicyAction, PolicyState

# Built once: every proxy asks for it five times a second.
_SERVING = (
    sa.select(schema.policies)
    .where(sa.or_(*(schema.policies.c.state == state for state in SERVING)))
    .order_by(schema.policies.c.alias, schema.policies.c.version)
)


class PolicyReads:
    """Queries over policy versions."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def serving(self) -> list[Policy]:
        """Return the versions of every alias that serve new trajectories."""
        with read(self._engine) as connection:
            return [row_to(Policy, row) for row in connection.execute(_SERVING)]

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the number of versions by alias and state."""
        table = schema.policies
        query = sa.select(table.c.alias, table.c.state, sa.func.count()).group_by(table.c.alias, table.c.state)
        found: dict[str, dict[str, int]] = {}
        with read(self._engine) as connection:
            for alias, state, count in connection.execute(query):
                found.setdefault(alias, {})[state] = int(count)
        return found

    def live(self) -> dict[str, Policy]:
        """Return the live version of every alias."""
        return {policy.alias: policy for policy in self._select(schema.policies.c.state == PolicyState.LIVE)}

    def awaiting_approval(self, alias: str) -> Policy | None:
        """Return the candidate or version in its ramp whose newest decision is a hold: only a person may promote it."""
        recorded = schema.policies.c.version == schema.decisions.c.version
        newest = (
            sa.select(sa.func.max(schema.decisions.c.id))
            .where(schema.decisions.c.alias == alias)
            .group_by(schema.decisions.c.version)
        )
        held = sa.exists().where(
            recorded, schema.decisions.c.id.in_(newest), schema.decisions.c.action == PolicyAction.HOLD
        )
        undecided = schema.policies.c.state.in_((PolicyState.CANDIDATE, PolicyState.RAMP))
        found = self._select(sa.and_(schema.policies.c.alias == alias, undecided, held))
        return found[-1] if found else None

    def list_unproven(self, alias: str) -> list[Policy]:
        """Return the unproven versions that are newer than the live one."""
        table = schema.policies
        live = sa.select(table.c.version).where(table.c.alias == alias, table.c.state == PolicyState.LIVE)
        newer = table.c.version > sa.func.coalesce(live.scalar_subquery(), BASE_VERSION)
        return self._select(sa.and_(table.c.alias == alias, table.c.state == PolicyState.UNPROVEN, newer))

    def get(self, alias: str, version: int) -> Policy:
        """Return a version. Raises RecordNotFound."""
        table = schema.policies
        found = self._select(sa.and_(table.c.alias == alias, table.c.version == version))
        if not found:
            raise RecordNotFound(f"no policy {alias}@{version}")
        return found[0]

    def all(self, alias: str | None = None) -> list[Policy]:
        """Return all versions, of one alias or of all, oldest first."""
        return self._select(schema.policies.c.alias == alias if alias else sa.true())

    def _usable(self, alias: str, version: int) -> Policy:
        policy = self.get(alias, version)
        if policy.pruned_at is not None:
            raise InvalidTransition(f"{alias}@{version} cannot serve again: its folder was pruned")
        return policy

    def _why_rejected(self, alias: str, version: int) -> str:
        table = schema.decisions
        mine = sa.and_(table.c.alias == alias, table.c.version == version)
        rejecting = table.c.action.in_((PolicyAction.REJECT, PolicyAction.ROLLBACK))
        query = (
            sa.select(table.c.decided_by, table.c.reason).where(mine, rejecting).order_by(table.c.id.desc()).limit(1)
        )
        with read(self._engine) as connection:
            row = connection.execute(query).one_or_none()
        return "" if row is None else f" by {row.decided_by} ({row.reason})"

    def _select(self, where: sa.ColumnElement[bool]) -> list[Policy]:
        table = schema.policies
        with read(self._engine) as connection:
            rows = connection.execute(sa.select(table).where(where).order_by(table.c.alias, table.c.version)).all()
        return [row_to(Policy, row) for row in rows]
