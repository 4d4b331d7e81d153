"""Fewer index entries for each call: what its own answer keeps, or a trajectory does not have yet, is in no index."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"

_PARTIAL = (("group_id",), ("round_id",), ("task", "opened_at"))

# A call's last prompt message needs nothing of its own where an answer of the call is stored under it.
_HOLD = """
    UPDATE calls SET retained_node = prompt_node WHERE length(prompt_node) > 0 AND NOT EXISTS (
        SELECT 1 FROM choices JOIN messages ON messages.hash = choices.reply_node
        WHERE choices.call_id = calls.id AND messages.parent = calls.prompt_node)
"""


def upgrade() -> None:
    op.add_column("calls", sa.Column("retained_node", sa.LargeBinary()))
    op.execute(_HOLD)
    op.drop_index("ix_calls_prompt_node", "calls")
    _index("calls", ["retained_node"], sa.text("retained_node IS NOT NULL"))
    for columns in _PARTIAL:
        op.drop_index("_".join(("ix_trajectories", *columns)), "trajectories")
        _index("trajectories", list(columns), sa.text(f"{columns[0]} IS NOT NULL"))


def downgrade() -> None:
    for columns in _PARTIAL:
        op.drop_index("_".join(("ix_trajectories", *columns)), "trajectories")
        _index("trajectories", list(columns))
    op.drop_index("ix_calls_held_node", "calls")
    op.create_index("ix_calls_prompt_node", "calls", ["prompt_node"])
    op.drop_column("calls", "retained_node")


def _index(table: str, columns: list[str], where: sa.TextClause | None = None) -> None:
    op.create_index("_".join(("ix", table, *columns)), table, columns, sqlite_where=where, postgresql_where=where)
