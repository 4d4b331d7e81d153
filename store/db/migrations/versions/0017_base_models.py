"""Which base model each version belongs to. Versions of before belong to one that is not known yet."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    op.create_table(
        "base_models",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("files", sa.JSON, nullable=False),
        sa.Column("served", sa.JSON, nullable=False),
        sa.Column("registered_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_base_models")),
    )
    # In words that both databases know: SQLite adds a column with its reference, and no reference alone.
    op.execute(
        "ALTER TABLE policies ADD COLUMN base_id VARCHAR(40) CONSTRAINT fk_policies_base_id REFERENCES base_models (id)"
    )


def downgrade() -> None:
    raise NotImplementedError("which base model a version belongs to has no place in the schema before")
