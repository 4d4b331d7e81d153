"""Alembic's entry point. Runs in the connection and transaction that `engine.migrate` opened."""

from __future__ import annotations

from alembic import context

from ratchet.store.db.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
    transactional_ddl=False,  # the caller holds one transaction around all migrations
)
context.run_migrations()
