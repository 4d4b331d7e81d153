"""ProxyInstances: what every running proxy says it serves and holds, so that the trainer knows when a version has
drained."""

from __future__ import annotations

import msgspec
import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.db.bulk import insert_or_ignore
from ratchet.store.db.engine import read, write
from ratchet.store.records import ProxyInstance

_FORGOTTEN = 3600.0  # seconds of silence after which a proxy that was killed is forgotten


class ProxyInstances:
    """The verbs over doors."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def beat(self, door: ProxyInstance) -> None:
        """Write what a proxy knows now."""
        table = schema.doors
        row = msgspec.structs.asdict(door) | {"live": dict(door.live), "pins": dict(door.pins)}
        with write(self._engine) as connection:
            insert_or_ignore(connection, table, [row])
            connection.execute(sa.delete(table).where(table.c.heartbeat_at < door.heartbeat_at - _FORGOTTEN))
            connection.execute(sa.update(table).where(table.c.id == door.id).values(**row))

    def open(self, alias: str | None, since: float) -> list[ProxyInstance]:
        """Return the proxies that serve an alias, or any, and were heard of since then (Unix seconds)."""
        table = schema.doors
        with read(self._engine) as connection:
            rows = connection.execute(sa.select(table).where(table.c.heartbeat_at >= since)).all()
        doors = [
            ProxyInstance(**{name: getattr(row, name) for name in ProxyInstance.__struct_fields__}) for row in rows
        ]
        return [door for door in doors if alias is None or alias in door.live]

    def shipped_until(self, alias: str, now: float, since: float) -> float:
        """Return the moment up to which every open proxy has shipped what it recorded; `now` where none is open."""
        return min([now, *(door.shipped_until for door in self.open(alias, since))])

    def close(self, door_id: str) -> None:
        """Forget a proxy that has stopped."""
        with write(self._engine) as connection:
            connection.execute(sa.delete(schema.doors).where(schema.doors.c.id == door_id))


PROXY_TIMEOUT_SECONDS = 10.0  # seconds after which a proxy that does not beat counts as gone
