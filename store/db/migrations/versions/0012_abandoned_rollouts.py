"""A rollout may be abandoned; a doctor's look at a workflow is a run of its own kind."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"

_KINDS = "'select-model', 'prompt', 'weights', 'eval', 'lessons', 'doctor'"
_STATES = "'planned', 'ended', 'failed', 'abandoned'"


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        for table, column, listed in (("tunings", "kind", _KINDS), ("rollouts", "state", _STATES)):
            op.drop_constraint(f"ck_{table}_{column}_known", table)
            op.create_check_constraint(f"ck_{table}_{column}_known", table, f"{column} IN ({listed})")
    else:
        _rebuild()
    told = "CAST(config AS TEXT) LIKE '{\"doctor\"%'"
    op.execute(f"UPDATE tunings SET kind = 'doctor' WHERE kind = 'eval' AND {told}")


def _rebuild() -> None:
    """SQLite: a constraint changes only with its table; the rollouts, which refer to the runs, wait aside meanwhile."""
    op.execute("CREATE TABLE waiting_rollouts AS SELECT * FROM rollouts")
    op.drop_table("rollouts")
    _tunings()
    op.execute("INSERT INTO new_tunings SELECT * FROM tunings")
    op.drop_table("tunings")
    op.rename_table("new_tunings", "tunings")
    op.create_index("ix_tunings_kind_began_at", "tunings", ["kind", "started_at"])
    _rollouts()
    op.execute("INSERT INTO rollouts SELECT * FROM waiting_rollouts")
    op.drop_table("waiting_rollouts")


def _tunings() -> None:
    op.create_table(
        "new_tunings",
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


def _rollouts() -> None:
    op.create_table(
        "rollouts",
        sa.Column("id", sa.String(128), nullable=False),
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
        sa.CheckConstraint(f"state IN ({_STATES})", name=op.f("ck_rollouts_state_known")),
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


def downgrade() -> None:
    raise NotImplementedError("abandoned rollouts have no place in the schema before: restore a backup")
