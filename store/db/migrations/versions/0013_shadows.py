"""Resamples: further answers to the prompt of a recorded call, written down before they are asked for."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    collation = "C" if op.get_bind().dialect.name == "postgresql" else None
    op.create_table(
        "resamples",
        sa.Column("id", sa.String(128, collation=collation), nullable=False),
        sa.Column("original_id", sa.String(128, collation=collation), nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("alias", sa.String(128), nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("tokens", sa.Integer, nullable=False),
        sa.Column("planned_at", sa.Double, nullable=False),
        sa.Column("asked_at", sa.Double),
        sa.Column("ended_at", sa.Double),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("failure", sa.Text),
        sa.CheckConstraint("state IN ('planned', 'asked', 'answered', 'failed')", name=op.f("ck_shadows_state_known")),
        sa.CheckConstraint(
            "(state IN ('answered', 'failed')) = (ended_at IS NOT NULL)", name=op.f("ck_shadows_end_is_known")
        ),
        sa.CheckConstraint("(state = 'failed') = (failure IS NOT NULL)", name=op.f("ck_shadows_failure_has_reason")),
        sa.ForeignKeyConstraint(
            ["original_id"], ["trajectories.id"], name=op.f("fk_shadows_original_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_shadows")),
        sa.UniqueConstraint("original_id", "number", name=op.f("uq_shadows_original_id_number")),
    )
    op.create_index("ix_shadows_alias_asked_at", "resamples", ["alias", "asked_at"])


def downgrade() -> None:
    op.drop_table("resamples")
