"""The audit log: who read and changed what. Entries are never changed by anything but their own request.

A change has its entry before it happens, with the outcome afterwards. Entries hold no content, no keys and no bodies.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import msgspec
import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.db.bulk import insert_or_ignore
from ratchet.store.db.engine import read, write
from ratchet.store.ids import new_id
from ratchet.store.records.audit import AuditEntry
from ratchet.store.records.base import row_to

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
