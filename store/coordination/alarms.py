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

    def clear(self, *names: str) -> None:
        """Clear alarms; no effect on those that are not active."""
        table = schema.alarms
        active = sa.and_(table.c.name.in_(names), table.c.cleared_at.is_(None))
        with read(self._engine) as connection:  # most are not, and a reader waits for nobody
            found = list(connection.scalars(sa.select(table.c.name).where(active)))
        if not found:
            return
        with write(self._engine) as connection:
            connection.execute(sa.update(table).where(active).values(cleared_at=time.time()))

    def unsent(self, now: float, quiet_seconds: float) -> list[Alarm]:
        """Return the alarms whose raising or clearing was not sent, oldest first.

        An alarm that was cleared before it was sent is left out; so is one that is active again within `quiet_seconds`
        of its last message, until these are over.
        """
        table = schema.alarms
        raised = sa.and_(
            table.c.cleared_at.is_(None),
            sa.or_(
                table.c.sent_at.is_(None),
                sa.and_(table.c.sent_at < table.c.raised_at, table.c.sent_at <= now - quiet_seconds),
            ),
        )
        cleared = sa.and_(table.c.sent_at >= table.c.raised_at, table.c.sent_at < table.c.cleared_at)
        query = sa.select(table).where(sa.or_(raised, cleared)).order_by(table.c.last_raised_at, table.c.name)
        with read(self._engine) as connection:
            return [row_to(Alarm, row) for row in connection.execute(query)]

    def mark_sent(self, alarm: Alarm, now: float) -> None:
        """Record that an alarm was sent as it was read; a change since then is sent as well."""
        table = schema.alarms
        changed_at = alarm.raised_at if alarm.cleared_at is None else alarm.cleared_at
        with write(self._engine) as connection:
            connection.execute(
                sa.update(table)
                .where(table.c.name == alarm.name, table.c.raised_at == alarm.raised_at)
                .where(table.c.cleared_at.is_not_distinct_from(alarm.cleared_at))
                .values(sent_at=max(now, changed_at))
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
