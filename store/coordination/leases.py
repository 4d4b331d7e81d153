"""Leases: one owner at a time, while it renews the lease."""

from __future__ import annotations

import time
from collections.abc import Collection

import msgspec
import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.db.bulk import insert_or_ignore
from ratchet.store.db.engine import read, write


class LeaseHolder(msgspec.Struct, frozen=True):
    """The holder of a lease and its expiry (Unix seconds)."""

    name: str
    owner: str
    expires_at: float


class Leases:
    """Operations on leases. Owners are names that the caller makes unique, e.g. host, pid and a random part."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def acquire(self, name: str, owner: str, seconds: float) -> bool:
        """Acquire or renew a lease for `seconds`; return False if another owner holds it."""
        table, now = schema.leases, time.time()
        with write(self._engine) as connection:
            insert_or_ignore(connection, table, [{"name": name, "owner": owner, "expires_at": now + seconds}])
            free = sa.or_(table.c.owner == owner, table.c.expires_at < now)
            acquired = connection.execute(
                sa.update(table).where(table.c.name == name, free).values(owner=owner, expires_at=now + seconds)
            )
            return bool(acquired.rowcount)

    def renew(self, names: Collection[str], owner: str, seconds: float) -> set[str]:
        """Renew those of the leases that `owner` still holds for `seconds`; return their names."""
        table = schema.leases
        mine = sa.and_(table.c.name.in_(sorted(names)), table.c.owner == owner)
        with write(self._engine) as connection:
            renewed = sa.update(table).where(mine).values(expires_at=time.time() + seconds)
            return set(connection.scalars(renewed.returning(table.c.name)))

    def holders(self, prefix: str) -> list[LeaseHolder]:
        """Return the leases with this name prefix that have not expired, by name."""
        table = schema.leases
        current = sa.and_(
            table.c.name >= prefix, table.c.name < f"{prefix}\U0010ffff", table.c.expires_at >= time.time()
        )
        with read(self._engine) as connection:
            rows = connection.execute(sa.select(table).where(current).order_by(table.c.name))
            return [LeaseHolder(row.name, row.owner, row.expires_at) for row in rows]

    def release(self, name: str, owner: str) -> None:
        """Release a lease; no effect if `owner` does not hold it."""
        table = schema.leases
        with write(self._engine) as connection:
            connection.execute(sa.delete(table).where(table.c.name == name, table.c.owner == owner))
