"""What a single was compared with stands beside its verdict, so that it keeps it however long it waits for a round."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    op.add_column("verdicts", sa.Column("baseline_mean", sa.Double()))
    op.add_column("verdicts", sa.Column("baseline_std", sa.Double()))


def downgrade() -> None:
    op.drop_column("verdicts", "baseline_std")
    op.drop_column("verdicts", "baseline_mean")
