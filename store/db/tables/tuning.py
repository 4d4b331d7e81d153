"""Tables of the tuner: tasks, runs and their rollouts."""

from __future__ import annotations

import sqlalchemy as sa

from ratchet.store.db.table_types import ID, JSON, TASK_ID, TIME, TRAJECTORY_ID, enum_constraint, metadata
from ratchet.store.states import RolloutState, TuningKind, TuningState

tasks = sa.Table(
    "tasks",
    metadata,
    sa.Column("id", TASK_ID, primary_key=True),
    sa.Column("task_set", sa.Text, nullable=False),
    sa.Column("split", sa.Text, nullable=False),
    sa.Column("content", JSON, nullable=False),
)

tunings = sa.Table(
    "tunings",
    metadata,
    sa.Column("id", ID, primary_key=True),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("alias", sa.String(128), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("config", JSON, nullable=False),
    sa.Column("result", sa.JSON(none_as_null=True)),
    sa.Column("error", sa.Text),
    sa.Column("started_at", TIME, nullable=False),
    sa.Column("ended_at", TIME),
    enum_constraint("kind", TuningKind),
    enum_constraint("state", TuningState),
    # Only a running tuning has no end.
    sa.CheckConstraint("(state = 'running') = (ended_at IS NULL)", name="end_is_known"),
    # A failed run has a reason.
    sa.CheckConstraint("state <> 'failed' OR error IS NOT NULL", name="failure_has_reason"),
    sa.Index(None, "kind", "started_at"),
)

rollouts = sa.Table(
    "rollouts",
    metadata,
    sa.Column("id", TRAJECTORY_ID, primary_key=True),
    sa.Column("tuning_id", ID, sa.ForeignKey("tunings.id"), nullable=False),
    sa.Column("task_id", TASK_ID, nullable=False),
    sa.Column("split", sa.Text, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("candidate", sa.String(256), nullable=False),
    sa.Column("model", sa.String(128)),
    sa.Column("purpose", sa.String(16), nullable=False),
    sa.Column("prompt_id", ID, sa.ForeignKey("prompts.id")),
    sa.Column("key_id", sa.String(64)),
    sa.Column("scenario", JSON, nullable=False),
    sa.Column("step", sa.Integer, nullable=False),
    sa.Column("planned_at", TIME, nullable=False),
    sa.Column("started_at", TIME),
    sa.Column("ended_at", TIME),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("failure", sa.Text),
    sa.Column("response", sa.Text),
    sa.Column("reward", sa.Double),
    sa.Column("metrics", JSON, nullable=False),
    sa.Column("prompt_tokens", sa.Integer, nullable=False),
    sa.Column("completion_tokens", sa.Integer, nullable=False),
    sa.Column("score", sa.Double),
    sa.Column("judge", sa.Text),
    sa.Column("judge_failure", sa.Text),
    enum_constraint("state", RolloutState),
    # Live trajectories may be trained, gathered ones on request; those of an evaluation never.
    sa.CheckConstraint("purpose IN ('live', 'eval', 'gathered')", name="purpose_known"),
    # Only a planned rollout has no end.
    sa.CheckConstraint("(state = 'planned') = (ended_at IS NULL)", name="end_is_known"),
    # Only a failed rollout has a reason.
    sa.CheckConstraint("(state = 'failed') = (failure IS NOT NULL)", name="failure_has_reason"),
    # A judge failure is never a number; scores and failures have a judge.
    sa.CheckConstraint("score IS NULL OR judge_failure IS NULL", name="score_or_failure"),
    sa.CheckConstraint("(judge IS NULL) = (score IS NULL AND judge_failure IS NULL)", name="score_has_judge"),
    sa.Index(None, "tuning_id", "candidate"),
    sa.Index(None, "prompt_id"),
)
