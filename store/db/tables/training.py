"""Tables of training: groups, verdicts, judge requests, rounds and what they trained on."""

from __future__ import annotations

import sqlalchemy as sa

from ratchet.store.db.column_types import Bytes
from ratchet.store.db.table_types import CALL_ID, ID, JSON, TIME, TRAJECTORY_ID, enum_constraint, metadata
from ratchet.store.states import GroupState, RoundState

groups = sa.Table(
    "groups",
    metadata,
    sa.Column("id", ID, primary_key=True),
    sa.Column("key", sa.Text, nullable=False),
    sa.Column("alias", sa.String(128), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("formed_at", TIME, nullable=False),
    sa.Column("failures", sa.Integer, nullable=False, server_default="0"),
    sa.Column("retry_at", TIME),
    sa.Column("drop_reason", sa.Text),
    enum_constraint("state", GroupState),
    sa.CheckConstraint("(state = 'dropped') = (drop_reason IS NOT NULL)", name="drop_has_reason"),
    sa.Index(None, "state", "formed_at"),
)

# Verdicts are only added; the latest one of a trajectory counts.
verdicts = sa.Table(
    "verdicts",
    metadata,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("trajectory_id", TRAJECTORY_ID, sa.ForeignKey("trajectories.id"), nullable=False),
    sa.Column("group_id", ID, sa.ForeignKey("groups.id")),
    sa.Column("judge", sa.Text, nullable=False),
    sa.Column("judge_version", sa.String(64), nullable=False),
    sa.Column("score", sa.Double),
    sa.Column("failure", sa.Text),
    sa.Column("explanation", sa.Text, nullable=False),
    sa.Column("components", JSON, nullable=False),
    sa.Column("cost", sa.Double),
    sa.Column("latency", sa.Double, nullable=False),
    sa.Column("judged_at", TIME, nullable=False),
    sa.Column("judge_request_id", ID),
    sa.Column("baseline_mean", sa.Double),
    sa.Column("baseline_std", sa.Double),
    # A judge failure is never a number: a verdict has either a score or a failure.
    sa.CheckConstraint("(score IS NULL) <> (failure IS NULL)", name="score_or_failure"),
    sa.Index(None, "trajectory_id", "id"),
    sa.Index(None, "group_id"),
)

# The newest score of a teacher, by trajectory: the logprobs of its sampled tokens, compressed.
teacher_scores = sa.Table(
    "teacher_scores",
    metadata,
    sa.Column("trajectory_id", TRAJECTORY_ID, sa.ForeignKey("trajectories.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("teacher", sa.Text, nullable=False),
    sa.Column("answers", Bytes, nullable=False),
)

judge_requests = sa.Table(
    "judge_requests",
    metadata,
    sa.Column("id", ID, primary_key=True),
    sa.Column("group_id", ID, sa.ForeignKey("groups.id")),
    sa.Column("judge", sa.Text, nullable=False),
    sa.Column("url", sa.Text, nullable=False),
    sa.Column("request", Bytes, nullable=False),
    sa.Column("response", Bytes, nullable=False),
    sa.Column("status", sa.Integer, nullable=False),
    sa.Column("error", sa.Text),
    sa.Column("prompt_tokens", sa.Integer, nullable=False),
    sa.Column("completion_tokens", sa.Integer, nullable=False),
    sa.Column("cost", sa.Double),
    sa.Column("latency", sa.Double, nullable=False),
    sa.Column("requested_at", TIME, nullable=False),
    sa.Index(None, "group_id", "id"),
)

rounds = sa.Table(
    "rounds",
    metadata,
    sa.Column("id", ID, primary_key=True),
    sa.Column("alias", sa.String(128), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("from_version", sa.Integer, nullable=False),
    sa.Column("to_version", sa.Integer),
    sa.Column("started_at", TIME, nullable=False),
    sa.Column("ended_at", TIME),
    sa.Column("checkpoint", sa.Text),
    sa.Column("metrics", JSON, nullable=False),
    sa.Column("reason", sa.Text),
    enum_constraint("state", RoundState),
    # A committed round has a checkpoint and a version.
    sa.CheckConstraint(
        "state <> 'committed' OR (checkpoint IS NOT NULL AND to_version IS NOT NULL)", name="commit_is_complete"
    ),
    sa.Index(None, "alias", "started_at"),
)
# At most one round of an alias is in progress.
sa.Index("uq_rounds_started", rounds.c.alias, unique=True, sqlite_where=rounds.c.state == "started",
         postgresql_where=rounds.c.state == "started")  # fmt: skip

# What a round did with each sampled answer of its trajectories; for display.
answer_training = sa.Table(
    "answer_training",
    metadata,
    sa.Column("call_id", CALL_ID, sa.ForeignKey("calls.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("choice", sa.Integer, primary_key=True),
    sa.Column("round_id", ID, sa.ForeignKey("rounds.id"), nullable=False),
    sa.Column("advantage", sa.Double),
    sa.Column("untrained", sa.Text),
    sa.Column("mismatch", Bytes, nullable=False),
    sa.Column("advantages", Bytes, nullable=False),
    # An answer carries loss with an advantage, or has a reason why not.
    sa.CheckConstraint("(advantage IS NULL) <> (untrained IS NULL)", name="advantage_or_reason"),
)

# Trajectories that a round used for SFT without consuming them: other rounds may still train them.
sft_trajectories = sa.Table(
    "sft_trajectories",
    metadata,
    sa.Column("round_id", ID, sa.ForeignKey("rounds.id"), primary_key=True),
    sa.Column("trajectory_id", TRAJECTORY_ID, sa.ForeignKey("trajectories.id", ondelete="CASCADE"), primary_key=True),
    sa.Index(None, "trajectory_id"),
)

# Observations are only added; the newest one of a kind and a subject counts.
observations = sa.Table(
    "observations",
    metadata,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("alias", sa.String(128), nullable=False),
    sa.Column("kind", sa.String(32), nullable=False),
    sa.Column("subject", sa.Text, nullable=False),
    sa.Column("content", JSON, nullable=False),
    sa.Column("recorded_at", TIME, nullable=False),
    sa.Index(None, "alias", "kind", "id"),
)

# The latest progress of each phase of an alias.
job_progress = sa.Table(
    "job_progress",
    metadata,
    sa.Column("alias", sa.String(128), primary_key=True),
    sa.Column("phase", sa.String(32), primary_key=True),
    sa.Column("done", sa.Double, nullable=False),
    sa.Column("total", sa.Double, nullable=False),
    sa.Column("seconds", sa.Double, nullable=False),
    sa.Column("means", JSON, nullable=False),
    sa.Column("ended", sa.Boolean, nullable=False),
    sa.Column("updated_at", TIME, nullable=False),
)
