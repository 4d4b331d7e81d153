"""Leases: one owner at a time, for as long as it keeps renewing."""

from __future__ import annotations

import time

import msgspec
import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.db.bulk import insert_or_ignore
from ratchet.store.db.engine import read, write


class LeaseHolder(msgspec.Struct, frozen=True):
    """Who holds a lease, and until when if it is not renewed (Unix seconds)."""

    name: str
    owner: str
    expires_at: float


class Leases:
    """Operations on leases. Owners are names that the caller makes unique, e.g. host, pid and a random part."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def acquire(self, name: str, owner: str, seconds: float) -> bool:
        """Take or renew a lease for `seconds`; False when another owner holds it."""
        table, now = schema.leases, time.time()
        with write(self._engine) as connection:
            insert_or_ignore(connection, table, [{"name": name, "owner": owner, "expires_at": now + seconds}])
            free = sa.or_(table.c.owner == owner, table.c.expires_at < now)
            taken = connection.execute(
                sa.update(table).where(table.c.name == name, free).values(owner=owner, expires_at=now + seconds)
            )
            return bool(taken.rowcount)

    def holders(self, prefix: str) -> list[LeaseHolder]:
        """Return the leases whose names begin so, by name; those that expired are held by nobody."""
        table = schema.leases
        begins = sa.and_(
            table.c.name >= prefix, table.c.name < f"{prefix}\U0010ffff", table.c.expires_at >= time.time()
        )
        with read(self._engine) as connection:
            rows = connection.execute(sa.select(table).where(begins).order_by(table.c.name))
            return [LeaseHolder(row.name, row.owner, row.expires_at) for row in rows]

    def release(self, name: str, owner: str) -> None:
        """Give a lease back; nothing happens where it is not held by `owner`."""
        table = schema.leases
        with write(self._engine) as connection:
            connection.execute(sa.delete(table).where(table.c.name == name, table.c.owner == owner))
