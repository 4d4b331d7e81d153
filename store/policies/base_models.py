"""Base models: the one that the versions of an alias belong to, identified by its files and by its server.

    file_digests        SHA-256 by part: config, weights, tokenizer, chat_template; empty if the files were not readable
    server_fingerprint  answers of a server to fixed requests (fingerprints.py); empty until one was queried

Guarantees: all versions of an alias belong to one base model. Its values are written once, and cleared only while no
further version or trajectory depends on them. Reads no file and sends no request.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.db.engine import write
from ratchet.store.db.verbs import Verbs, matches
from ratchet.store.ids import new_id
from ratchet.store.records import BASE_VERSION, BaseModel


class BaseModels(Verbs):
    def base_model_of(self, alias: str, version: int = BASE_VERSION) -> BaseModel | None:
        """Return the base model of a version; None if it is unknown."""
        policies = schema.policies
        query = sa.select(schema.base_models).join(policies, policies.c.base_model_id == schema.base_models.c.id)
        return next(iter(self._records(BaseModel, query.where(matches(policies, alias=alias, version=version)))), None)

    def register_base_model(
        self,
        alias: str,
        name: str,
        *,
        file_digests: Mapping[str, str] | None = None,
        server_fingerprint: Mapping[str, Any] | None = None,
    ) -> BaseModel | None:
        """Store the missing values of an alias's base model; known values stay.

        Returns the base model; None if the alias has no version 0 yet.
        """
        policies = schema.policies
        given = {"file_digests": dict(file_digests or {}), "server_fingerprint": dict(server_fingerprint or {})}
        base = matches(policies, alias=alias, version=BASE_VERSION)
        with write(self._engine) as connection:
            row = connection.execute(sa.select(policies.c.base_model_id).where(base).with_for_update()).one_or_none()
            if row is None:
                return None
            known = row.base_model_id or new_id("base")
            if row.base_model_id is None:
                fresh = {"id": known, "name": name, "registered_at": time.time(), **given}
                connection.execute(sa.insert(schema.base_models).values(**fresh))
                unknown = sa.and_(policies.c.alias == alias, policies.c.base_model_id.is_(None))
                connection.execute(sa.update(policies).where(unknown).values(base_model_id=known))
            else:
                _fill_missing(connection, known, name, given)
        return self.base_model_of(alias)

    def clear_base_model(self, alias: str, *, served_only: bool = False) -> bool:
        """Clear an alias's base model if it has no further version and no trajectory; return whether it was cleared.

        `served_only`: clear the fingerprint of its server, in any case.
        """
        policies, runs = schema.policies, schema.trajectories
        mine = policies.c.alias == alias
        with write(self._engine) as connection:
            if served_only:
                ids = sa.select(policies.c.base_model_id).where(mine, policies.c.base_model_id.is_not(None))
                connection.execute(
                    sa.update(schema.base_models).where(schema.base_models.c.id.in_(ids)).values(server_fingerprint={})
                )
                return True
            later = sa.exists().where(mine, policies.c.version != BASE_VERSION)
            if connection.scalar(sa.select(sa.or_(later, sa.exists().where(runs.c.alias == alias)))):
                return False
            connection.execute(sa.update(policies).where(mine).values(base_model_id=None))
        return True


def base_model_id_of(alias: str) -> sa.ScalarSelect[Any]:
    """Return the subquery of an alias's base model, to register a version."""
    policies = schema.policies.alias("base_policies")
    mine = matches(policies, alias=alias, version=BASE_VERSION)
    return sa.select(policies.c.base_model_id).where(mine).scalar_subquery()


def _fill_missing(connection: sa.Connection, known: str, name: str, given: Mapping[str, Mapping[str, Any]]) -> None:
    """Store given values that are missing; digests also set the name."""
    one = schema.base_models.c.id == known
    row = connection.execute(sa.select(schema.base_models).where(one)).one()
    new = {key: value for key, value in given.items() if value and not getattr(row, key)}
    if "file_digests" in new:
        new["name"] = name  # type: ignore[assignment]
    if new:
        connection.execute(sa.update(schema.base_models).where(one).values(**new))
