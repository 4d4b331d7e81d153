"""Tool calls, held against their schemas."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

_OUTCOMES = "'valid', 'unknown_tool', 'invalid_json', 'schema_violation', 'unexpected_argument', 'unchecked'"


def upgrade() -> None:
    postgres = op.get_bind().dialect.name == "postgresql"
    op.create_table(
        "tool_calls",
        sa.Column("call_id", sa.String(length=40, collation="C" if postgres else None), nullable=False),
        sa.Column("choice", sa.Integer(), nullable=False),
        sa.Column("place", sa.Integer(), nullable=False),
        sa.Column("alias", sa.String(length=128), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("tool", sa.Text(), nullable=False),
        sa.Column("tool_call_id", sa.Text(), nullable=False),
        sa.Column("outcome", sa.String(length=24), nullable=False),
        sa.Column("result", sa.String(length=16), nullable=True),
        sa.Column("detail", sa.Text(), nullable=True),
        sa.CheckConstraint(f"outcome IN ({_OUTCOMES})", name=op.f("ck_tool_calls_outcome_known")),
        sa.CheckConstraint("result IN ('ok', 'error', 'timeout', 'empty')", name=op.f("ck_tool_calls_result_known")),
        sa.ForeignKeyConstraint(["call_id"], ["calls.id"], name=op.f("fk_tool_calls_call_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("call_id", "choice", "place", name=op.f("pk_tool_calls")),
    )
    op.create_index(op.f("ix_tool_calls_alias_version_tool"), "tool_calls", ["alias", "version", "tool"])


def downgrade() -> None:
    op.drop_table("tool_calls")
