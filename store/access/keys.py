"""API keys, what they own, and the audit log of what they read and changed."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec
import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.db.bulk import insert_or_ignore
from ratchet.store.db.engine import write
from ratchet.store.db.verbs import Verbs, matches
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


class Keys(Verbs):
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
        self._change(sa.insert(schema.keys).values(**msgspec.structs.asdict(key)))
        return key

    def all(self) -> list[Key]:
        """Return all keys, including revoked ones, oldest first."""
        return [_key(row) for row in self._rows(sa.select(schema.keys).order_by(schema.keys.c.id))]

    def revoke(self, key_id: str) -> Key:
        """Revoke a key; revoking it again changes nothing. Raises RecordNotFound."""
        table = schema.keys
        valid = sa.update(table).where(table.c.id == key_id, table.c.revoked_at.is_(None))
        with write(self._engine) as connection:
            connection.execute(valid.values(revoked_at=time.time()))
            return _get(connection, key_id)

    def update(self, key_id: str, **limits: Any) -> Key:
        """Change limits of an agent's key, or when a key expires; None: no limit. Raises RecordNotFound.

        `limits`: some of `CHANGEABLE`. Raises InvalidTransition for limits of an operator's key, and for a revoked one.
        """
        table = schema.keys
        unknown = limits.keys() - set(CHANGEABLE)
        if unknown or not limits:
            raise InvalidTransition(f"of a key, these can change: {', '.join(CHANGEABLE)}")
        with write(self._engine) as connection:
            key = _get(connection, key_id)
            if key.revoked_at is not None:
                raise InvalidTransition(f"key {key_id} ({key.name}) is revoked, for good: create another one")
            if key.scope is not KeyScope.AGENT and limits.keys() != {"expires_at"}:
                raise InvalidTransition("an operator's key has no limits: only its expiry can change")
            connection.execute(sa.update(table).where(table.c.id == key_id).values(**limits))
            return _get(connection, key_id)

    def record_use(self, key_ids: Collection[str], at: float) -> None:
        """Record when keys were last used (Unix seconds, approximate)."""
        self._change(sa.update(schema.keys).where(schema.keys.c.id.in_(key_ids)).values(last_used_at=at))


def _get(connection: sa.Connection, key_id: str) -> Key:
    for row in connection.execute(sa.select(schema.keys).where(schema.keys.c.id == key_id)):
        return _key(row)
    raise RecordNotFound(f"no key {key_id}; `ratchet keys list` shows the ids")


def _key(row: Any) -> Key:
    names = {name: None if getattr(row, name) is None else tuple(getattr(row, name)) for name in ("agents", "models")}
    return row_to(Key, row, **names)


# The audit log: who read and changed what. Entries are never changed by anything but their own request.
#
# A change has its entry before it happens, with the outcome afterwards. Entries hold no content, no keys and no bodies.

COMMAND_LINE = "CLI"
_READS = ("GET", "HEAD")
_MAX_PRUNED = 5_000  # entries in one transaction


class AuditVerbs(Verbs):
    """Operations on the audit log."""

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
        query = sa.select(table).where(matches(table, key_id=key)).order_by(table.c.id.desc()).limit(limit)
        query = query.where(table.c.id < before) if before is not None else query
        query = query.where(table.c.last_at >= since) if since is not None else query
        query = query.where(table.c.method.not_in(_READS)) if changes else query
        return self._records(AuditEntry, query)

    def prune(self, before: float) -> int:
        """Delete some of the entries that were last seen before a time; return how many."""
        table = schema.audit_entries
        old = sa.select(table.c.id).where(table.c.last_at < before).limit(_MAX_PRUNED)
        return self._change(sa.delete(table).where(table.c.id.in_(old)))
