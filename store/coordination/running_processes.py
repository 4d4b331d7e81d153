"""The processes that use a store now, as it knows them: for a migration, which must not run under them.

Reads only tables and columns that a store of any schema has, and none from a store that lacks them. A process that was
killed counts as running until its lease, or its latest heartbeat, has expired.
"""

from __future__ import annotations

import time

import sqlalchemy as sa

from ratchet.store.coordination.proxies import PROXY_TIMEOUT_SECONDS
from ratchet.store.db import schema
from ratchet.store.db.engine import read

_HOLDERS = ("controller:", "trainer:", "tuning:")  # the leases whose owners use the store; a learner does not


def running_processes(engine: sa.Engine) -> list[str]:
    """Return proxies, trainers and runs of the tuner that use the store, for people. Raises StoreUnavailable."""
    proxies, leases, now = schema.proxy_instances.c, schema.leases.c, time.time()
    with read(engine) as connection:
        tables = sa.inspect(connection).get_table_names()
        if not {schema.proxy_instances.name, schema.leases.name} <= {*tables}:
            return []
        urls = connection.scalars(sa.select(proxies.url).where(proxies.heartbeat_at > now - PROXY_TIMEOUT_SECONDS))
        found = {f"proxy {url}" for url in urls}
        for name, owner in connection.execute(sa.select(leases.name, leases.owner).where(leases.expires_at > now)):
            if name.startswith(_HOLDERS):
                process = owner.rpartition("_")[0] or owner  # without its id: HOST:PID
                found.add(f"{'run of the tuner' if name.startswith('tuning:') else 'trainer'} {process}")
    return sorted(found)
