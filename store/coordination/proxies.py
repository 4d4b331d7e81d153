"""ProxyInstances: what every running proxy says it serves and holds, so that the trainer knows when a version has
drained."""

from __future__ import annotations

import msgspec
import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.db.bulk import insert_or_ignore
from ratchet.store.db.engine import read, write
from ratchet.store.records import ProxyInstance
from ratchet.store.records.base import row_to

_DELETE_AFTER_SECONDS = 3600.0  # seconds of silence after which a proxy that was killed is forgotten


class ProxyInstances:
    """Operations on instances."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def heartbeat(self, instance: ProxyInstance) -> None:
        """Write what a proxy knows now."""
        table = schema.proxy_instances
        row = msgspec.structs.asdict(instance) | {
            "live_versions": dict(instance.live_versions),
            "pinned_trajectories": dict(instance.pinned_trajectories),
        }
        with write(self._engine) as connection:
            insert_or_ignore(connection, table, [row])
            connection.execute(
                sa.delete(table).where(table.c.heartbeat_at < instance.heartbeat_at - _DELETE_AFTER_SECONDS)
            )
            connection.execute(sa.update(table).where(table.c.id == instance.id).values(**row))

    def running(self, alias: str | None, since: float) -> list[ProxyInstance]:
        """Return the proxies that serve an alias, or any, and were heard of since then (Unix seconds)."""
        table = schema.proxy_instances
        with read(self._engine) as connection:
            rows = connection.execute(sa.select(table).where(table.c.heartbeat_at >= since)).all()
        instances = [row_to(ProxyInstance, row) for row in rows]
        return [instance for instance in instances if alias is None or alias in instance.live_versions]

    def shipped_until(self, alias: str, now: float, since: float) -> float:
        """Return the moment up to which every open proxy has shipped what it recorded; `now` where none is open."""
        return min([now, *(instance.shipped_until for instance in self.running(alias, since))])

    def remove(self, instance_id: str) -> None:
        """Forget a proxy that has stopped."""
        with write(self._engine) as connection:
            connection.execute(sa.delete(schema.proxy_instances).where(schema.proxy_instances.c.id == instance_id))


PROXY_TIMEOUT_SECONDS = 10.0  # seconds after which a proxy that does not beat counts as gone
