"""Smaller rows: hashes as bytes, ids with their width; what the lists and the deletion look things up by."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

from ratchet.store.db.column_types import compress_token_ids, pack_hash

revision = "0004"
down_revision = "0003"

_HASHES = {
    "messages": ("hash", "parent"),
    "toolsets": ("hash",),
    "trajectories": ("root_node", "tools_hash"),
    "calls": ("prompt_node", "tools_hash"),
    "choices": ("reply_node", "link_key"),
}
_IDS = {"calls": "prompt_ids", "choices": "ids"}
_BYTEWISE = (
    ("trajectories", "id", 128),
    ("calls", "id", 40),
    ("calls", "trajectory_id", 128),
    ("calls", "parent_call", 40),
    ("choices", "call_id", 40),
    ("verdicts", "trajectory_id", 128),
)


def upgrade() -> None:
    postgres = op.get_bind().dialect.name == "postgresql"
    op.drop_index("ix_calls_started_at_id", "calls")
    if postgres:
        _change_columns()
    else:
        _rebuild()
    op.create_index(op.f("ix_messages_parent"), "messages", ["parent"])
    op.create_index(op.f("ix_calls_prompt_node"), "calls", ["prompt_node"])
    for columns in (
        ("state", "opened_at"),
        ("alias", "opened_at"),
        ("alias", "state", "opened_at"),
        ("alias", "version", "opened_at"),
        ("task", "opened_at"),
        ("key_id", "opened_at"),
        ("round_id",),
    ):
        op.create_index(op.f("ix_trajectories_" + "_".join(columns)), "trajectories", list(columns))
    dropped, unanswered = sa.text("drop_reason IS NOT NULL"), sa.text("state <> 'answered'")
    op.create_index(
        "ix_trajectories_drop_reason", "trajectories", ["drop_reason"], sqlite_where=dropped, postgresql_where=dropped
    )
    op.create_index(
        "ix_calls_unanswered", "calls", ["state", "id"], sqlite_where=unanswered, postgresql_where=unanswered
    )
    op.add_column("calls", sa.Column("prompt_blocks", sa.LargeBinary(), nullable=True))
    identity = sa.String(length=128, collation="C" if postgres else None)
    _blocks(identity)
    _tags(postgres, identity)


def _change_columns() -> None:
    """PostgreSQL: change the types in place. Mirrors `pack_hash`."""
    for table, columns in _HASHES.items():
        changes = [
            f"ALTER COLUMN {name} TYPE bytea USING CASE WHEN {name} = '' THEN ''::bytea "
            f"WHEN {name} ~ '^b2:[0-9a-f]{{32}}$' THEN '\\x01'::bytea || decode(substr({name}, 4), 'hex') "
            f"ELSE '\\x00'::bytea || convert_to({name}, 'UTF8') END"
            for name in columns
        ]
        op.execute(sa.text(_quoted(f"ALTER TABLE {table} {', '.join(changes)}")))
    for table, name in _IDS.items():
        op.execute(sa.text(_quoted(f"UPDATE {table} SET {name} = '\\x04'::bytea || {name} WHERE length({name}) > 0")))
    for table, column, size in _BYTEWISE:
        op.execute(f'ALTER TABLE {table} ALTER COLUMN {column} TYPE varchar({size}) COLLATE "C"')


def _quoted(statement: str) -> str:
    """Return a statement whose colons are no parameters."""
    return statement.replace(":", "\\:")


def _rebuild() -> None:
    """SQLite: a column that is no key gets a successor; tables whose key changes are copied (none refers to them)."""
    connection = op.get_bind().connection.dbapi_connection
    assert connection is not None
    connection.create_function("packed", 1, pack_hash, deterministic=True)
    connection.create_function("squeezed", 1, compress_token_ids, deterministic=True)
    for table in ("messages", "toolsets"):
        op.rename_table(table, f"old_{table}")
        columns: list[sa.Column[Any]] = [sa.Column("hash", sa.LargeBinary(), nullable=False)]
        if table == "messages":
            columns += [sa.Column("parent", sa.LargeBinary(), nullable=False)]
            columns += [sa.Column("role", sa.String(length=32), nullable=False)]
        columns += [sa.Column("body", sa.LargeBinary(), nullable=False)]
        op.create_table(table, *columns, sa.PrimaryKeyConstraint("hash", name=op.f(f"pk_{table}")))
        taken = "packed(hash), packed(parent), role" if table == "messages" else "packed(hash)"
        op.execute(f"INSERT INTO {table} SELECT {taken}, body FROM old_{table} ORDER BY rowid")
        op.drop_table(f"old_{table}")
    for table, name in _IDS.items():
        op.execute(f"UPDATE {table} SET {name} = squeezed({name}) WHERE length({name}) > 0")
    for table in ("trajectories", "calls", "choices"):
        for name in _HASHES[table]:
            op.execute(f"ALTER TABLE {table} ADD COLUMN new_{name} BLOB NOT NULL DEFAULT x''")
        filled = ", ".join(f"new_{name} = packed({name})" for name in _HASHES[table])
        op.execute(f"UPDATE {table} SET {filled}")
        for name in _HASHES[table]:
            op.execute(f"ALTER TABLE {table} DROP COLUMN {name}")
            op.execute(f"ALTER TABLE {table} RENAME COLUMN new_{name} TO {name}")


def _blocks(identity: sa.String) -> None:
    op.create_table(
        "blocks",
        sa.Column("trajectory_id", identity, nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("ids", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["trajectory_id"], ["trajectories.id"], name=op.f("fk_blocks_trajectory_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("trajectory_id", "digest", name=op.f("pk_blocks")),
    )


def _tags(postgres: bool, identity: sa.String) -> None:
    op.create_table(
        "tags",
        sa.Column("tag", sa.String(length=128), nullable=False),
        sa.Column("opened_at", sa.Double(), nullable=False),
        sa.Column("trajectory_id", identity, nullable=False),
        sa.ForeignKeyConstraint(
            ["trajectory_id"], ["trajectories.id"], name=op.f("fk_tags_trajectory_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("tag", "opened_at", "trajectory_id", name=op.f("pk_tags")),
    )
    op.create_index(op.f("ix_tags_trajectory_id"), "tags", ["trajectory_id"])
    each = "json_array_elements_text(calls.tags) AS tag(value)" if postgres else "json_each(calls.tags) AS tag"
    op.execute(
        "INSERT INTO tags SELECT DISTINCT substr(tag.value, 1, 128), trajectories.opened_at, trajectories.id "
        f"FROM calls JOIN trajectories ON trajectories.id = calls.trajectory_id, {each}"
    )
