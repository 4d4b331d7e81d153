"""What was deleted, and messages that may be nobody's any more."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.create_table(
        "deletions",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("why", sa.Text(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("last_at", sa.Double(), nullable=False),
        sa.Column("trajectories", sa.Integer(), nullable=False),
        sa.Column("calls", sa.Integer(), nullable=False),
        sa.Column("policies", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_deletions")),
    )
    op.create_table(
        "orphan_candidates",
        sa.Column("hash", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("hash", name=op.f("pk_unclaimed")),
    )
    op.create_index(op.f("ix_choices_reply_node"), "choices", ["reply_node"])


def downgrade() -> None:
    op.drop_index("ix_choices_reply_node", "choices")
    op.drop_table("orphan_candidates")
    op.drop_table("deletions")
