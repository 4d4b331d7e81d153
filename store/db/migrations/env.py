"""Alembic's entry: runs inside the connection and transaction that `store.database.migrate` opened."""

from __future__ import annotations

from alembic import context

from ratchet.store.db.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
    transactional_ddl=False,  # the caller holds the one transaction around everything
)
context.run_migrations()
