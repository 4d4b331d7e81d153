"""How far each long work of a trainer is."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    op.create_table(
        "works",
        sa.Column("alias", sa.String(128), nullable=False),
        sa.Column("work", sa.String(32), nullable=False),
        sa.Column("done", sa.Double, nullable=False),
        sa.Column("total", sa.Double, nullable=False),
        sa.Column("seconds", sa.Double, nullable=False),
        sa.Column("means", sa.JSON, nullable=False),
        sa.Column("ended", sa.Boolean, nullable=False),
        sa.Column("noted_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("alias", "work", name="pk_works"),
    )


def downgrade() -> None:
    op.drop_table("works")
