"""Alarms: conditions that need a person. Raising one again increments its count; a cleared one stays readable."""

from __future__ import annotations

import time

import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.db.bulk import insert_or_ignore
from ratchet.store.db.engine import read, write
from ratchet.store.records import Alarm
from ratchet.store.records.base import row_to


class Alarms:
    """Operations on alarms."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def raise_(self, name: str, reason: str) -> None:
        """Raise an alarm; if it is active, increment its count and update its reason."""
        table, now = schema.alarms, time.time()
        row = {
            "name": name,
            "reason": reason,
            "raised_at": now,
            "last_raised_at": now,
            "count": 0,
            "cleared_at": None,
        }
        raised_at = sa.case((table.c.cleared_at.is_not(None), now), else_=table.c.raised_at)
        with write(self._engine) as connection:
            insert_or_ignore(connection, table, [row])
            connection.execute(
                sa.update(table)
                .where(table.c.name == name)
                .values(
                    reason=reason, last_raised_at=now, raised_at=raised_at, count=table.c.count + 1, cleared_at=None
                )
            )

    def clear(self, name: str) -> None:
        """Clear an alarm; no effect if it is not active."""
        table = schema.alarms
        with write(self._engine) as connection:
            connection.execute(
                sa.update(table)
                .where(table.c.name == name, table.c.cleared_at.is_(None))
                .values(cleared_at=time.time())
            )

    def active(self) -> list[Alarm]:
        """Return the alarms that are not cleared, newest first."""
        return [alarm for alarm in self.all() if alarm.cleared_at is None]

    def all(self) -> list[Alarm]:
        """Return all alarms, including cleared ones, the latest first."""
        table = schema.alarms
        with read(self._engine) as connection:
            rows = connection.execute(sa.select(table).order_by(table.c.last_raised_at.desc())).all()
        return [row_to(Alarm, row) for row in rows]
