"""A version may be unproven: its proof could not decide."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"

_STATES = "'candidate', 'canary', 'live', 'unproven', 'retired', 'rejected'"
_KEPT = (
    "alias, version, state, served_name, adapter, created_at, round_id, evidence, share, pruned_at, prompt_id, base_id"
)
_ACTIONS = "'canary', 'hold', 'promote', 'unproven', 'reject', 'rollback'"


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        for table, name, rule in (
            ("policies", "state_known", f"state IN ({_STATES})"),
            ("decisions", "action_known", f"action IN ({_ACTIONS})"),
        ):
            for named in (f"ck_{table}_{name}", f"ck_{table}_ck_{table}_{name}"):  # 0009 gave the prefix twice
                op.execute(f"ALTER TABLE {table} DROP CONSTRAINT IF EXISTS {named}")
            op.create_check_constraint(op.f(f"ck_{table}_{name}"), table, rule)
    else:
        _rebuild()


def _rebuild() -> None:
    """SQLite: a constraint changes only with its table; the decisions, which refer to the versions, wait aside."""
    op.execute("CREATE TABLE waiting_decisions AS SELECT * FROM decisions")
    op.drop_table("decisions")
    _policies()
    op.execute(f"INSERT INTO new_policies ({_KEPT}) SELECT {_KEPT} FROM policies")
    op.drop_table("policies")
    op.rename_table("new_policies", "policies")
    for state in ("live", "canary"):
        where = sa.text(f"state = '{state}'")
        op.create_index(f"uq_policies_{state}", "policies", ["alias"], unique=True, sqlite_where=where)
    _decisions()
    op.execute("INSERT INTO decisions SELECT * FROM waiting_decisions ORDER BY id")
    op.drop_table("waiting_decisions")


def _policies() -> None:
    op.create_table(
        "new_policies",
        sa.Column("alias", sa.String(128), nullable=False),
        sa.Column("version", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("served_name", sa.Text, nullable=False),
        sa.Column("adapter", sa.Text, nullable=True),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("round_id", sa.String(40), nullable=True),
        sa.Column("evidence", sa.JSON, nullable=False),
        sa.Column("share", sa.Double, nullable=True),
        sa.Column("pruned_at", sa.Double, nullable=True),
        sa.Column("prompt_id", sa.String(40), nullable=True),
        sa.Column("base_id", sa.String(40), nullable=True),
        sa.CheckConstraint(f"state IN ({_STATES})", name=op.f("ck_policies_state_known")),
        sa.CheckConstraint(
            "(version = 0) = (adapter IS NULL AND prompt_id IS NULL)", name=op.f("ck_policies_base_serves_as_it_is")
        ),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.id"], name=op.f("fk_policies_round_id")),
        sa.ForeignKeyConstraint(["prompt_id"], ["prompts.id"], name=op.f("fk_policies_prompt_id")),
        sa.ForeignKeyConstraint(["base_id"], ["base_models.id"], name=op.f("fk_policies_base_id")),
        sa.PrimaryKeyConstraint("alias", "version", name=op.f("pk_policies")),
    )


def _decisions() -> None:
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
            ["alias", "version"], ["policies.alias", "policies.version"], name=op.f("fk_decisions_alias")
        ),
        sa.CheckConstraint(f"action IN ({_ACTIONS})", name=op.f("ck_decisions_action_known")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_decisions")),
    )
    op.create_index("ix_decisions_alias_version_id", "decisions", ["alias", "version", "id"])


def downgrade() -> None:
    raise NotImplementedError("unproven versions have no place in the schema before: restore a backup")
