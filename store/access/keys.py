"""API keys: a name, a scope, agents, limits, and the SHA-256 of the key. The key itself is not stored.

A revoked key keeps its row, because records name its id, and because revoking the last key must not turn
authentication off.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.db.engine import read, write
from ratchet.store.errors import InvalidTransition, RecordNotFound
from ratchet.store.ids import new_id
from ratchet.store.records import Key
from ratchet.store.records.base import row_to
from ratchet.store.states import KeyScope

CHANGEABLE = (
    "requests_per_minute", "tokens_per_minute", "max_parallel_requests", "max_tokens", "tokens_per_day",
    "tokens_per_month", "expires_at",
)  # fmt: skip


class Keys:
    """Operations on keys."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def create(
        self,
        name: str,
        key_hash: str,
        scope: KeyScope,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        agents: Collection[str] | None = None,
        max_parallel_requests: int | None = None,
        *,
        expires_at: float | None = None,
        models: Collection[str] | None = None,
        max_tokens: int | None = None,
        tokens_per_day: int | None = None,
        tokens_per_month: int | None = None,
    ) -> Key:
        """Store a new key by its SHA-256 hex; return it.

        `agents`, and `models` of `model_list`: those that it may call; None: all. Raises InvalidTransition for neither
        an agent nor a model, and for limits of an operator's key.
        """
        limits = (agents, models, max_tokens, tokens_per_day, tokens_per_month)
        if scope is not KeyScope.AGENT and any(limit is not None for limit in limits):
            raise InvalidTransition("an operator's key opens all agents: only an agent's key can be limited")
        if agents is not None and not agents and not models:
            raise InvalidTransition("a key is limited to at least one agent or one model of model_list")
        key = Key(
            id=new_id("key"),
            name=name,
            hash=key_hash,
            scope=scope,
            created_at=time.time(),
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
            agents=None if agents is None else tuple(sorted(set(agents))),
            max_parallel_requests=max_parallel_requests,
            expires_at=expires_at,
            models=None if models is None else tuple(sorted(set(models))),
            max_tokens=max_tokens,
            tokens_per_day=tokens_per_day,
            tokens_per_month=tokens_per_month,
        )
        row = {field: getattr(key, field) for field in Key.__struct_fields__}
        with write(self._engine) as connection:
            connection.execute(sa.insert(schema.keys).values(**row))
        return key

    def all(self) -> list[Key]:
        """Return all keys, including revoked ones, oldest first."""
        with read(self._engine) as connection:
            rows = connection.execute(sa.select(schema.keys).order_by(schema.keys.c.id)).all()
        return [_key(row) for row in rows]

    def revoke(self, key_id: str) -> Key:
        """Revoke a key; revoking it again changes nothing. Raises RecordNotFound."""
        table = schema.keys
        with write(self._engine) as connection:
            connection.execute(
                sa.update(table)
                .where(table.c.id == key_id, table.c.revoked_at.is_(None))
                .values(revoked_at=time.time())
            )
            row = connection.execute(sa.select(table).where(table.c.id == key_id)).one_or_none()
        if row is None:
            raise RecordNotFound(f"no key {key_id}; `ratchet keys list` shows the ids")
        return _key(row)

    def update(self, key_id: str, **limits: Any) -> Key:
        """Change limits of an agent's key, or when a key expires; None: no limit. Raises RecordNotFound.

        `limits`: some of `CHANGEABLE`. Raises InvalidTransition for limits of an operator's key, and for a revoked one.
        """
        table = schema.keys
        unknown = limits.keys() - set(CHANGEABLE)
        if unknown or not limits:
            raise InvalidTransition(f"of a key, these can change: {', '.join(CHANGEABLE)}")
        with write(self._engine) as connection:
            row = connection.execute(sa.select(table).where(table.c.id == key_id)).one_or_none()
            if row is not None and row.revoked_at is not None:
                raise InvalidTransition(f"key {key_id} ({row.name}) is revoked, for good: create another one")
            if row is not None and row.scope != KeyScope.AGENT and limits.keys() != {"expires_at"}:
                raise InvalidTransition("an operator's key has no limits: only its expiry can change")
            connection.execute(sa.update(table).where(table.c.id == key_id).values(**limits))
            row = connection.execute(sa.select(table).where(table.c.id == key_id)).one_or_none()
        if row is None:
            raise RecordNotFound(f"no key {key_id}; `ratchet keys list` shows the ids")
        return _key(row)

    def record_use(self, key_ids: Collection[str], at: float) -> None:
        """Record when keys were last used (Unix seconds, approximate)."""
        table = schema.keys
        with write(self._engine) as connection:
            connection.execute(sa.update(table).where(table.c.id.in_(key_ids)).values(last_used_at=at))


def _key(row: Any) -> Key:
    names = {name: None if getattr(row, name) is None else tuple(getattr(row, name)) for name in ("agents", "models")}
    return row_to(Key, row, **names)
