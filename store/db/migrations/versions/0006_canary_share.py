"""The share of new trajectories that a canary serves."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.add_column("policies", sa.Column("share", sa.Double(), nullable=True))
    canary = sa.text("state = 'canary'")
    op.create_index(
        "uq_policies_canary", "policies", ["alias"], unique=True, sqlite_where=canary, postgresql_where=canary
    )


def downgrade() -> None:
    op.drop_index("uq_policies_canary", "policies")
    op.drop_column("policies", "share")
