"""Registration of versions: the base model, versions that differ by their prompt, and where they are served."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from ratchet.store.db import schema
from ratchet.store.db.bulk import insert_or_ignore
from ratchet.store.db.engine import write
from ratchet.store.errors import InvalidRecord, InvalidTransition, RecordNotFound
from ratchet.store.policies.base_models import base_model_id_of
from ratchet.store.policies.decisions import record_decision
from ratchet.store.policies.policy_reads import PolicyReads
from ratchet.store.policies.shares import check_shares
from ratchet.store.records import BASE_VERSION, Policy
from ratchet.store.states import PolicyAction, PolicyState


class PolicyRegistration(PolicyReads):
    """Operations that add versions."""

    def register_base(self, alias: str, served_name: str) -> Policy:
        """Register version 0 of an alias: the base model that vLLM serves as `served_name`.

        It is live until another version is. Registering again updates the served name only. Raises InvalidRecord if
        the store has versions of an agent whose name differs by case only.
        """
        table = schema.policies
        base = sa.and_(table.c.alias == alias, table.c.adapter.is_(None))  # version 0 and its prompt versions
        with write(self._engine) as connection:
            _check_case(connection, alias)
            insert_or_ignore(
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

    def register_prompt_version(
        self,
        alias: str,
        prompt_id: str | None,
        evidence: Mapping[str, Any],
        *,
        share: float | None = None,
        by: str = "tuner",
        reason: str = "a prompt on trial",
    ) -> Policy:
        """Register a candidate: the live version with another prompt, or with None.

        With a `share`, its ramp begins at once. Raises RecordNotFound, and InvalidTransition if the live version has
        this prompt or is pinned, no version is live, or another one is in its ramp.
        """
        table = schema.policies
        with write(self._engine) as connection:
            live = _lock_live(connection, alias)
            if share is not None and live.pinned_at is not None:
                raise InvalidTransition(f"{alias}@{live.version} is pinned: `ratchet policies unpin {alias}` first")
            _check_prompt(connection, alias, live, prompt_id)
            row = {
                "alias": alias,
                "state": PolicyState.CANDIDATE if share is None else PolicyState.RAMP,
                "share": share,
                "served_name": live.served_name,
                "adapter": live.adapter,
                "replicas": list(live.replicas),
                "prompt_id": prompt_id,
                "created_at": time.time(),
                "evidence": dict(evidence),
                "base_model_id": base_model_id_of(alias),
            }
            newest = connection.scalar(sa.select(sa.func.max(table.c.version)).where(table.c.alias == alias))
            version = int(newest or 0) + 1
            try:
                connection.execute(sa.insert(table).values(version=version, **row))
            except IntegrityError as taken:
                raise InvalidTransition(
                    f"{alias}@{version} was made by another process, or another version is in its ramp"
                ) from taken
            if share is not None:
                check_shares(connection, alias)
                recorded = {**evidence, "share": share}
                record_decision(connection, alias, version, PolicyAction.RAMP, by, reason, recorded)
        return self.get(alias, version)

    def adopt_prompt(self, alias: str, version: int) -> Policy:
        """Give a candidate the prompt of the live version.

        Raises InvalidTransition if it is no longer a candidate, or no version is live.
        """
        table = schema.policies
        mine = sa.and_(table.c.alias == alias, table.c.version == version, table.c.state == PolicyState.CANDIDATE)
        with write(self._engine) as connection:
            change = sa.update(table).where(mine).values(prompt_id=_lock_live(connection, alias).prompt_id)
            if not connection.execute(change).rowcount:
                raise InvalidTransition(f"{alias}@{version} is no longer a candidate")
        return self.get(alias, version)

    def record_replicas(self, alias: str, served_name: str, replicas: Sequence[str]) -> None:
        """Record the URLs of the replicas that serve the versions with this served name as they were trained."""
        table = schema.policies
        mine = sa.and_(table.c.alias == alias, table.c.served_name == served_name)
        with write(self._engine) as connection:
            connection.execute(sa.update(table).where(mine).values(replicas=list(replicas)))


def _check_case(connection: sa.Connection, alias: str) -> None:
    """Raise InvalidRecord if another agent has versions under this name in another case."""
    table = schema.policies
    others = connection.scalars(sa.select(table.c.alias).where(table.c.version > BASE_VERSION).distinct())
    for other in others:
        if other != alias and other.casefold() == alias.casefold():
            raise InvalidRecord(
                f"agent {alias}: the store has versions of {other}, whose name differs by case only; name it {other} "
                "to go on with them, or choose another name"
            )


def _lock_live(connection: sa.Connection, alias: str) -> Any:
    """Return the row of the live version, locked until the transaction ends. Raises InvalidTransition."""
    table = schema.policies
    live = sa.select(table).where(table.c.alias == alias, table.c.state == PolicyState.LIVE).with_for_update()
    for _ in range(2):  # PostgreSQL returns no row if it waited for one that was retired meanwhile
        if (row := connection.execute(live).one_or_none()) is not None:
            return row
    raise InvalidTransition(f"alias {alias} has no live version: start `ratchet proxy` first")


def _check_prompt(connection: sa.Connection, alias: str, live: Any, prompt_id: str | None) -> None:
    if live.prompt_id == prompt_id:
        raise InvalidTransition(f"{alias}@{live.version} is live and has prompt {prompt_id or '(none)'} already")
    if prompt_id is None and live.adapter is None:
        raise InvalidTransition(f"{alias} without a prompt is the base model: roll back to {alias}@{BASE_VERSION}")
    known = sa.select(schema.prompts.c.id).where(schema.prompts.c.id == prompt_id)
    if prompt_id is not None and connection.scalar(known) is None:
        raise RecordNotFound(f"no prompt {prompt_id}")
