"""What was decided about policy versions, and when a version's folder was pruned."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.create_table(
        "decisions",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("alias", sa.String(128), nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("action", sa.String(16), nullable=False),
        sa.Column("by", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("evidence", sa.JSON, nullable=False),
        sa.Column("decided_at", sa.Double, nullable=False),
        sa.ForeignKeyConstraint(
            ["alias", "version"], ["policies.alias", "policies.version"], name="fk_decisions_alias"
        ),
        sa.CheckConstraint(
            "action IN ('canary', 'hold', 'promote', 'reject', 'rollback')", name="ck_decisions_action_known"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_decisions"),
    )
    op.create_index("ix_decisions_alias_version_id", "decisions", ["alias", "version", "id"])
    op.add_column("policies", sa.Column("pruned_at", sa.Double(), nullable=True))


def downgrade() -> None:
    op.drop_column("policies", "pruned_at")
    op.drop_table("decisions")
