"""Prompts, tasks, tunings and rollouts; a policy version may have a prompt instead of an adapter, or beside it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"

_RULE = "(version = 0) = (adapter IS NULL AND prompt_id IS NULL)"
_KINDS = "'select-model', 'prompt', 'weights', 'eval', 'lessons'"


def upgrade() -> None:
    _prompts_and_tasks()
    _tunings()
    _rollouts(op.get_bind().dialect.name == "postgresql")
    if op.get_bind().dialect.name == "postgresql":
        op.add_column("policies", sa.Column("prompt_id", sa.String(40), nullable=True))
        op.create_foreign_key("fk_policies_prompt_id", "policies", "prompts", ["prompt_id"], ["id"])
        op.drop_constraint("ck_policies_base_has_no_adapter", "policies")
        op.create_check_constraint("ck_policies_base_serves_as_it_is", "policies", _RULE)
    else:
        _rebuild()


def _prompts_and_tasks() -> None:
    op.create_table(
        "prompts",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("mode", sa.String(16), nullable=False),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("families", sa.JSON, nullable=False),
        sa.Column("origin", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.CheckConstraint("mode IN ('replace', 'append')", name=op.f("ck_prompts_mode_known")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_prompts")),
    )
    op.create_index("ix_prompts_created_at_id", "prompts", ["created_at", "id"])
    op.create_table(
        "tasks",
        sa.Column("id", sa.String(256), nullable=False),
        sa.Column("set", sa.Text, nullable=False),
        sa.Column("split", sa.Text, nullable=False),
        sa.Column("row", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tasks")),
    )


def _tunings() -> None:
    op.create_table(
        "tunings",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("alias", sa.String(128), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("config", sa.JSON, nullable=False),
        sa.Column("result", sa.JSON, nullable=True),
        sa.Column("error", sa.Text, nullable=True),
        sa.Column("started_at", sa.Double, nullable=False),
        sa.Column("ended_at", sa.Double, nullable=True),
        sa.CheckConstraint(f"kind IN ({_KINDS})", name=op.f("ck_tunings_kind_known")),
        sa.CheckConstraint("state IN ('running', 'done', 'failed', 'stopped')", name=op.f("ck_tunings_state_known")),
        sa.CheckConstraint("(state = 'running') = (ended_at IS NULL)", name=op.f("ck_tunings_end_is_known")),
        sa.CheckConstraint("state <> 'failed' OR error IS NOT NULL", name=op.f("ck_tunings_failure_has_reason")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tunings")),
    )
    op.create_index("ix_tunings_kind_began_at", "tunings", ["kind", "started_at"])


def _rollouts(postgres: bool) -> None:
    op.create_table(
        "rollouts",
        sa.Column("id", sa.String(128, collation="C" if postgres else None), nullable=False),
        sa.Column("tuning_id", sa.String(40), nullable=False),
        sa.Column("task_id", sa.String(256), nullable=False),
        sa.Column("split", sa.Text, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("candidate", sa.String(256), nullable=False),
        sa.Column("model", sa.String(128), nullable=True),
        sa.Column("purpose", sa.String(16), nullable=False),
        sa.Column("prompt_id", sa.String(40), nullable=True),
        sa.Column("key_id", sa.String(64), nullable=True),
        sa.Column("scenario", sa.JSON, nullable=False),
        sa.Column("step", sa.Integer, nullable=False),
        sa.Column("planned_at", sa.Double, nullable=False),
        sa.Column("started_at", sa.Double, nullable=True),
        sa.Column("ended_at", sa.Double, nullable=True),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("failure", sa.Text, nullable=True),
        sa.Column("response", sa.Text, nullable=True),
        sa.Column("reward", sa.Double, nullable=True),
        sa.Column("metrics", sa.JSON, nullable=False),
        sa.Column("prompt_tokens", sa.Integer, nullable=False),
        sa.Column("completion_tokens", sa.Integer, nullable=False),
        sa.Column("score", sa.Double, nullable=True),
        sa.Column("judge", sa.Text, nullable=True),
        sa.Column("judge_failure", sa.Text, nullable=True),
        sa.CheckConstraint("state IN ('planned', 'ended', 'failed')", name=op.f("ck_rollouts_state_known")),
        sa.CheckConstraint("purpose IN ('live', 'eval')", name=op.f("ck_rollouts_purpose_known")),
        sa.CheckConstraint("(state = 'planned') = (ended_at IS NULL)", name=op.f("ck_rollouts_end_is_known")),
        sa.CheckConstraint("(state = 'failed') = (failure IS NOT NULL)", name=op.f("ck_rollouts_failure_has_reason")),
        sa.CheckConstraint("score IS NULL OR judge_failure IS NULL", name=op.f("ck_rollouts_score_or_failure")),
        sa.CheckConstraint(
            "(judge IS NULL) = (score IS NULL AND judge_failure IS NULL)", name=op.f("ck_rollouts_score_has_judge")
        ),
        sa.ForeignKeyConstraint(["tuning_id"], ["tunings.id"], name=op.f("fk_rollouts_tuning_id")),
        sa.ForeignKeyConstraint(["prompt_id"], ["prompts.id"], name=op.f("fk_rollouts_prompt_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rollouts")),
    )
    op.create_index("ix_rollouts_tuning_id_candidate", "rollouts", ["tuning_id", "candidate"])
    op.create_index("ix_rollouts_prompt_id", "rollouts", ["prompt_id"])


def _rebuild() -> None:
    """SQLite: a constraint changes only with its table; what refers to the table waits aside meanwhile."""
    op.execute("CREATE TABLE waiting_decisions AS SELECT * FROM decisions")
    op.execute("DELETE FROM decisions")
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
        sa.CheckConstraint(
            "state IN ('candidate', 'canary', 'live', 'retired', 'rejected')", name=op.f("ck_policies_state_known")
        ),
        sa.CheckConstraint(_RULE, name=op.f("ck_policies_base_serves_as_it_is")),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.id"], name=op.f("fk_policies_round_id")),
        sa.ForeignKeyConstraint(["prompt_id"], ["prompts.id"], name=op.f("fk_policies_prompt_id")),
        sa.PrimaryKeyConstraint("alias", "version", name=op.f("pk_policies")),
    )
    kept = "alias, version, state, served_name, adapter, created_at, round_id, evidence, share, pruned_at"
    op.execute(f"INSERT INTO new_policies ({kept}) SELECT {kept} FROM policies")
    op.drop_table("policies")
    op.rename_table("new_policies", "policies")
    for state in ("live", "canary"):
        where = sa.text(f"state = '{state}'")
        op.create_index(f"uq_policies_{state}", "policies", ["alias"], unique=True, sqlite_where=where)
    op.execute("INSERT INTO decisions SELECT * FROM waiting_decisions ORDER BY id")
    op.drop_table("waiting_decisions")


def downgrade() -> None:
    raise NotImplementedError("versions with a prompt have no place in the schema before: restore a backup")
