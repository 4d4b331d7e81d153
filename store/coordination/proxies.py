"""Running proxies with the versions that they serve, so that the trainer knows when a version has drained."""

from __future__ import annotations

from datetime import datetime

import msgspec
import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.db.bulk import insert_or_ignore
from ratchet.store.db.engine import read, write
from ratchet.store.records import ProxyInstance
from ratchet.store.records.base import row_to

PROXY_TIMEOUT_SECONDS = 10.0  # without a heartbeat for this long, a proxy counts as stopped
_DELETE_AFTER_SECONDS = 3600.0  # without a heartbeat for this long, its row is deleted


class ProxyInstances:
    """Operations on proxy instances."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def heartbeat(self, instance: ProxyInstance, previous: float = 0.0) -> bool:
        """Store the current state of a proxy; its first one deletes the rows of proxies that stopped long ago.

        Return whether the store has the heartbeat of `previous`; else it is another one, or older than it was.
        """
        table = schema.proxy_instances
        row = msgspec.structs.asdict(instance) | {
            "live_versions": dict(instance.live_versions),
            "pinned_trajectories": dict(instance.pinned_trajectories),
        }
        own = sa.update(table).where(table.c.id == instance.id).values(**row)
        with write(self._engine) as connection:
            if connection.execute(own.where(table.c.heartbeat_at >= previous)).rowcount:
                return True
            if connection.execute(own).rowcount:
                return False
            insert_or_ignore(connection, table, [row])
            connection.execute(
                sa.delete(table).where(table.c.heartbeat_at < instance.heartbeat_at - _DELETE_AFTER_SECONDS)
            )
        return False

    def server_started_at(self) -> datetime | None:
        """Return when PostgreSQL's server was started; None for SQLite.

        It is another time after a restart and after a failover, in which the last commits may have been lost.
        """
        if self._engine.dialect.name == "sqlite":
            return None
        with read(self._engine) as connection:
            started_at: datetime | None = connection.scalar(sa.select(sa.func.pg_postmaster_start_time()))
            return started_at

    def running(self, alias: str | None, since: float) -> list[ProxyInstance]:
        """Return the proxies with a heartbeat since then (Unix seconds) that serve an alias, or any."""
        table = schema.proxy_instances
        with read(self._engine) as connection:
            rows = connection.execute(sa.select(table).where(table.c.heartbeat_at >= since)).all()
        instances = [row_to(ProxyInstance, row) for row in rows]
        return [instance for instance in instances if alias is None or alias in instance.live_versions]

    def shipped_until(self, alias: str | None, now: float, since: float) -> float:
        """Return the time up to which every running proxy of an alias, or of any, has shipped its records.

        It is `now` if none is running.
        """
        return min([now, *(instance.shipped_until for instance in self.running(alias, since))])

    def remove(self, instance_id: str) -> None:
        """Delete a proxy that has stopped."""
        with write(self._engine) as connection:
            connection.execute(sa.delete(schema.proxy_instances).where(schema.proxy_instances.c.id == instance_id))
