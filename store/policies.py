"""Policies: which versions of an alias exist, which one is live, and why.

Promises: at most one live version and one canary per alias; a promotion retires the old one in the same transaction;
every decision keeps its evidence.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from store import schema
from store.database import read, write
from store.errors import ForbiddenChange, UnknownRecord
from store.records import BASE_VERSION, Policy
from store.shipping import insert_new
from store.states import POLICY_STEPS, PolicyState, check


class Policies:
    """The verbs over policy versions."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def register_base(self, alias: str, served_name: str) -> Policy:
        """Make version 0 of an alias: the base model that vLLM serves as `served_name`.

        It is live until a trained version is. Registering again renews the served name and nothing else.
        """
        table = schema.policies
        base = sa.and_(table.c.alias == alias, table.c.version == BASE_VERSION)
        with write(self._engine) as connection:
            insert_new(
                connection,
                table,
                [
                    {
                        "alias": alias,
                        "version": BASE_VERSION,
                        "state": PolicyState.LIVE,
                        "served_name": served_name,
                        "adapter": None,
                        "created_at": time.time(),
                        "evidence": {},
                    }
                ],
            )
            connection.execute(sa.update(table).where(base).values(served_name=served_name))
        return self.get(alias, BASE_VERSION)

    def serving(self) -> list[Policy]:
        """Return the versions that new trajectories begin on: live ones and canaries, of every alias."""
        return self._select(schema.policies.c.state.in_((PolicyState.LIVE, PolicyState.CANARY)))

    def live(self) -> dict[str, Policy]:
        """Return the live version of every alias."""
        return {policy.alias: policy for policy in self._select(schema.policies.c.state == PolicyState.LIVE)}

    def get(self, alias: str, version: int) -> Policy:
        """Return one version. Raises UnknownRecord."""
        table = schema.policies
        found = self._select(sa.and_(table.c.alias == alias, table.c.version == version))
        if not found:
            raise UnknownRecord(f"no policy {alias}@{version}")
        return found[0]

    def all(self, alias: str | None = None) -> list[Policy]:
        """Return every version, of one alias or of all, oldest first."""
        return self._select(schema.policies.c.alias == alias if alias else sa.true())

    def promote(
        self, alias: str, version: int, evidence: Mapping[str, Any], *, only_from: PolicyState | None = None
    ) -> Policy:
        """Make a version live and retire the one that was; with `only_from`, only if that is its state.

        Raises ForbiddenChange, UnknownRecord.
        """
        policy = self.get(alias, version)
        check(POLICY_STEPS, policy.state, PolicyState.LIVE, f"policy {alias}@{version}")
        if only_from is not None and policy.state is not only_from:
            raise ForbiddenChange(f"policy {alias}@{version} is {policy.state} by now, not {only_from}")
        table = schema.policies
        with write(self._engine) as connection:
            connection.execute(
                sa.update(table)
                .where(table.c.alias == alias, table.c.state == PolicyState.LIVE)
                .values(state=PolicyState.RETIRED)
            )
            _settle(connection, policy, PolicyState.LIVE, evidence)
        return self.get(alias, version)

    def canary(self, alias: str, version: int, share: float, evidence: Mapping[str, Any] | None = None) -> Policy:
        """Let a candidate serve a share of new trajectories, more than 0 and less than 1; or change a canary's share.

        Raises ForbiddenChange where the alias has another canary, UnknownRecord.
        """
        if not 0.0 < share < 1.0:
            raise ForbiddenChange(f"policy {alias}@{version}: a canary's share is between 0 and 1, not {share:g}")
        policy = self.get(alias, version)
        if policy.state != PolicyState.CANARY:
            check(POLICY_STEPS, policy.state, PolicyState.CANARY, f"policy {alias}@{version}")
        serving = [found for found in self.serving() if found.alias == alias and found.version != version]
        if other := next((found.version for found in serving if found.state == PolicyState.CANARY), None):
            raise ForbiddenChange(f"{alias}@{other} is a canary already: promote or reject it before {alias}@{version}")
        with write(self._engine) as connection:
            _settle(connection, policy, PolicyState.CANARY, evidence or {}, share)
        return self.get(alias, version)

    def reject(self, alias: str, version: int, evidence: Mapping[str, Any]) -> Policy:
        """Mark a candidate that failed its proof or its gate. Raises ForbiddenChange, UnknownRecord."""
        policy = self.get(alias, version)
        check(POLICY_STEPS, policy.state, PolicyState.REJECTED, f"policy {alias}@{version}")
        with write(self._engine) as connection:
            _settle(connection, policy, PolicyState.REJECTED, evidence)
        return self.get(alias, version)

    def _select(self, where: sa.ColumnElement[bool]) -> list[Policy]:
        table = schema.policies
        with read(self._engine) as connection:
            rows = connection.execute(sa.select(table).where(where).order_by(table.c.alias, table.c.version)).all()
        return [
            Policy(
                state=PolicyState(row.state),
                **{n: getattr(row, n) for n in Policy.__struct_fields__ if n != "state"},
            )
            for row in rows
        ]


def _settle(
    connection: sa.Connection,
    policy: Policy,
    state: PolicyState,
    evidence: Mapping[str, Any],
    share: float | None = None,
) -> None:
    table = schema.policies
    one = sa.and_(table.c.alias == policy.alias, table.c.version == policy.version, table.c.state == policy.state)
    settled = connection.execute(
        sa.update(table).where(one).values(state=state, evidence=dict(policy.evidence) | dict(evidence), share=share)
    )
    if not settled.rowcount:
        raise ForbiddenChange(f"policy {policy.alias}@{policy.version} was changed by another process")
