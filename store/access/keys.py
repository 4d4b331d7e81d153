"""API keys, what they own, and the audit log of what they read and changed."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec
import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.db.bulk import insert_or_ignore
from ratchet.store.db.engine import read, write
from ratchet.store.errors import InvalidTransition, RecordNotFound
from ratchet.store.ids import new_id
from ratchet.store.operation_records import AuditEntry, Key
from ratchet.store.records import row_to
from ratchet.store.states import KeyScope

# API keys: a name, a scope, agents, limits, and the SHA-256 of the key. The key itself is not stored.
#
# A revoked key keeps its row, because records name its id, and because revoking the last key must not turn
# authentication off.

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


# The audit log: who read and changed what. Entries are never changed by anything but their own request.
#
# A change has its entry before it happens, with the outcome afterwards. Entries hold no content, no keys and no bodies.

COMMAND_LINE = "CLI"
_READS = ("GET", "HEAD")
_MAX_PRUNED = 5_000  # entries in one transaction


class AuditVerbs:
    """Operations on the audit log."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def record(self, entries: Iterable[AuditEntry]) -> None:
        """Insert entries, or bring those that exist up to date. Raises StoreUnavailable."""
        table = schema.audit_entries
        rows = [msgspec.structs.asdict(entry) for entry in entries]
        if not rows:
            return
        with write(self._engine) as connection:
            insert_or_ignore(connection, table, rows)
            for row in rows:
                changed = {name: row[name] for name in ("last_at", "count", "status")}
                connection.execute(sa.update(table).where(table.c.id == row["id"]).values(**changed))

    def record_command(self, user: str, command: str, target: Mapping[str, str]) -> None:
        """Record a change by the command line, such as `keys revoke`, once it has happened."""
        now = time.time()
        entry = AuditEntry(
            id=new_id("audit"), at=now, last_at=now, count=1, actor=user, method=COMMAND_LINE, route=command,
            target=dict(target), status=0,
        )  # fmt: skip
        self.record([entry])

    def page(
        self,
        limit: int = 100,
        before: str | None = None,
        *,
        key: str | None = None,
        since: float | None = None,
        changes: bool = False,
    ) -> list[AuditEntry]:
        """Return entries, newest first: of one key's id, last seen at `since` or later, or `changes` alone."""
        table = schema.audit_entries
        query = sa.select(table).order_by(table.c.id.desc()).limit(limit)
        if before is not None:
            query = query.where(table.c.id < before)
        if key is not None:
            query = query.where(table.c.key_id == key)
        if since is not None:
            query = query.where(table.c.last_at >= since)
        if changes:
            query = query.where(table.c.method.not_in(_READS))
        with read(self._engine) as connection:
            return [row_to(AuditEntry, row) for row in connection.execute(query)]

    def prune(self, before: float) -> int:
        """Delete some of the entries that were last seen before a time; return how many."""
        table = schema.audit_entries
        old = sa.select(table.c.id).where(table.c.last_at < before).limit(_MAX_PRUNED)
        with write(self._engine) as connection:
            return connection.execute(sa.delete(table).where(table.c.id.in_(old))).rowcount
