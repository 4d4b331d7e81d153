"""What a round imitated: a warm start learns from trajectories that it does not consume."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    collation = "C" if op.get_bind().dialect.name == "postgresql" else None
    op.create_table(
        "imitated",
        sa.Column("round_id", sa.String(40), nullable=False),
        sa.Column("trajectory_id", sa.String(128, collation=collation), nullable=False),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.id"], name=op.f("fk_imitated_round_id")),
        sa.ForeignKeyConstraint(
            ["trajectory_id"], ["trajectories.id"], name=op.f("fk_imitated_trajectory_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("round_id", "trajectory_id", name=op.f("pk_imitated")),
    )
    op.create_index("ix_imitated_trajectory_id", "imitated", ["trajectory_id"])


def downgrade() -> None:
    op.drop_table("imitated")
