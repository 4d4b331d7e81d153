"""Feedback of people, and the id that a client knows an answer by."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"

_CALL_ID = sa.String(40).with_variant(sa.String(40, collation="C"), "postgresql")
_TRAJECTORY_ID = sa.String(128).with_variant(sa.String(128, collation="C"), "postgresql")


def upgrade() -> None:
    op.add_column("calls", sa.Column("answer_id", sa.String(128), nullable=True))
    _partial("ix_calls_answer_id", "calls", "answer_id", "answer_id IS NOT NULL")
    op.create_table(
        "feedback",
        sa.Column("id", _CALL_ID, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("target", sa.String(256), nullable=False),
        sa.Column("source", sa.String(256), nullable=False),
        sa.Column("given_at", sa.Double(), nullable=False),
        sa.Column("key_id", sa.String(64), nullable=True),
        sa.Column("trusted", sa.Boolean(), nullable=False),
        sa.Column("value", sa.Double(), nullable=True),
        sa.Column("comment", sa.Text(), nullable=False),
        sa.Column("demonstration", sa.Text(), nullable=True),
        sa.Column("trajectory_id", _TRAJECTORY_ID, nullable=True),
        sa.Column("call_id", _CALL_ID, nullable=True),
        sa.Column("heard_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["trajectory_id"], ["trajectories.id"], name="fk_feedback_trajectory_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_feedback"),
    )
    op.create_index("ix_feedback_trajectory_id_given_at", "feedback", ["trajectory_id", "given_at"])
    op.create_index("ix_feedback_given_at_id", "feedback", ["given_at", "id"])
    _partial("ix_feedback_waiting", "feedback", "target", "trajectory_id IS NULL")
    _partial("ix_feedback_unapplied", "feedback", "trajectory_id", "heard_at IS NULL AND value IS NOT NULL")


def downgrade() -> None:
    op.drop_table("feedback")
    op.drop_index("ix_calls_answer_id", "calls")
    op.drop_column("calls", "answer_id")


def _partial(name: str, table: str, column: str, condition: str) -> None:
    where = sa.text(condition)
    op.create_index(name, table, [column], sqlite_where=where, postgresql_where=where)
