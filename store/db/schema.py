"""Every table of the store.

Each uniqueness rule is a database constraint with the rule above it. Until the first release the database is created
from these tables, and a change of them needs another `engine.HEAD`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import sqlalchemy as sa

from ratchet.store.db.column_types import Body, Bytes, Hash, Ids, pack_hash
from ratchet.store.states import (
    SERVING,
    CallState,
    GroupState,
    KeyScope,
    PolicyAction,
    PolicyState,
    PromptMode,
    ResampleState,
    RolloutState,
    RoundState,
    ToolOutcome,
    ToolResult,
    TrajectoryState,
    TuningKind,
    TuningState,
)

# Naming of constraints, and the column types of ids, times and states.

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

ID = sa.String(40)
# Compared by bytes in every locale, so that ids sort by time and pages follow ids.
CALL_ID = sa.String(40).with_variant(sa.String(40, collation="C"), "postgresql")
TRAJECTORY_ID = sa.String(128).with_variant(sa.String(128, collation="C"), "postgresql")
HASH = Hash
TIME: sa.Double[float] = sa.Double()
JSON = sa.JSON()
TASK_ID = sa.String(256)


def enum_constraint(column: str, states: type[StrEnum]) -> sa.CheckConstraint:
    """Return the constraint that a column has one of these states."""
    listed = ", ".join(f"'{state}'" for state in states)
    return sa.CheckConstraint(f"{column} IN ({listed})", name=f"{column}_known")


def index_when_set(table: sa.Table, *columns: str) -> None:
    """Index the rows in which the first of these columns is not null."""
    name = "_".join(("ix", table.name, *columns))
    index_where(name, table.c[columns[0]].is_not(None), *(table.c[column] for column in columns))


def index_where(name: str, where: sa.ColumnElement[bool], *columns: sa.Column[Any], unique: bool = False) -> None:
    """Index the rows for which `where` holds."""
    sa.Index(name, *columns, unique=unique, sqlite_where=where, postgresql_where=where)


# Tables of policy versions: base models, prompts, versions and the decisions on them.
base_models = sa.Table(
    "base_models",
    metadata,
    sa.Column("id", ID, primary_key=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("file_digests", JSON, nullable=False),
    sa.Column("server_fingerprint", JSON, nullable=False),
    sa.Column("registered_at", TIME, nullable=False),
)

prompts = sa.Table(
    "prompts",
    metadata,
    sa.Column("id", ID, primary_key=True),
    sa.Column("mode", sa.String(16), nullable=False),
    sa.Column("text", sa.Text, nullable=False),
    sa.Column("families", JSON, nullable=False),
    sa.Column("origin", sa.Text, nullable=False),
    sa.Column("created_at", TIME, nullable=False),
    enum_constraint("mode", PromptMode),
    sa.Index(None, "created_at", "id"),
)

policies = sa.Table(
    "policies",
    metadata,
    sa.Column("alias", sa.String(128), primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("served_name", sa.Text, nullable=False),
    sa.Column("adapter", sa.Text),
    sa.Column("created_at", TIME, nullable=False),
    sa.Column("round_id", ID, sa.ForeignKey("rounds.id")),
    sa.Column("evidence", JSON, nullable=False),
    sa.Column("share", sa.Double),
    sa.Column("pruned_at", TIME),
    sa.Column("pinned_at", TIME),
    sa.Column("recalled_at", TIME),
    sa.Column("prompt_id", ID, sa.ForeignKey("prompts.id")),
    sa.Column("base_model_id", ID, sa.ForeignKey("base_models.id")),
    sa.Column("replicas", JSON, nullable=False, server_default="[]"),
    enum_constraint("state", PolicyState),
    # Only versions beside the live one have a share; the live one has the rest.
    sa.CheckConstraint("(share IS NOT NULL) = (state IN ('ramp', 'holdback'))", name="share_beside_live"),
    sa.CheckConstraint("pinned_at IS NULL OR state = 'live'", name="pinned_is_live"),
    # Version 0 is the base model; every other version has an adapter, a prompt or both.
    sa.CheckConstraint("(version = 0) = (adapter IS NULL AND prompt_id IS NULL)", name="base_version_has_no_adapter"),
)
# At most one version of an alias is live, one is in its ramp and one is held back.
for _state in SERVING:
    index_where(f"uq_policies_{_state}", policies.c.state == _state.value, policies.c.alias, unique=True)

# What the release controller knows about a version: its evidence, for people and for the controller after a restart.
releases = sa.Table(
    "releases",
    metadata,
    sa.Column("alias", sa.String(128), primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("evidence", JSON, nullable=False),
    sa.Column("updated_at", TIME, nullable=False),
    sa.ForeignKeyConstraint(["alias", "version"], ["policies.alias", "policies.version"]),
)

# Decisions are only added; the newest one of a version counts.
decisions = sa.Table(
    "decisions",
    metadata,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("alias", sa.String(128), nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("action", sa.String(16), nullable=False),
    sa.Column("decided_by", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("evidence", JSON, nullable=False),
    sa.Column("decided_at", TIME, nullable=False),
    sa.ForeignKeyConstraint(["alias", "version"], ["policies.alias", "policies.version"]),
    enum_constraint("action", PolicyAction),
    sa.Index(None, "alias", "version", "id"),
)

# Tables of recorded traffic: messages, trajectories, calls, answers, tool calls and feedback.
# The condition, by dialect, that a message follows nothing or a system prompt, whose hash begins with four zero bytes.
_OTHERS = pack_hash("b2:00000001").hex()
SHARED_PARENT = {
    "sqlite": sa.text(f"parent < x'{_OTHERS}'"),
    "postgresql": sa.text(f"parent < '\\x{_OTHERS}'::bytea"),
}

# A message is stored once: its hash covers its parent and its content.
messages = sa.Table(
    "messages",
    metadata,
    sa.Column("hash", HASH, primary_key=True),
    sa.Column("parent", HASH, nullable=False),
    sa.Column("role", sa.String(32), nullable=False),
    sa.Column("body", Body, nullable=False),
    # The messages that follow any other one are in a range of the primary key: `conversation_range`.
    sa.Index(
        "ix_messages_shared_parent", "parent",
        sqlite_where=SHARED_PARENT["sqlite"], postgresql_where=SHARED_PARENT["postgresql"],
    ),
)  # fmt: skip

# A tool list is stored once.
toolsets = sa.Table(
    "toolsets",
    metadata,
    sa.Column("hash", HASH, primary_key=True),
    sa.Column("body", Body, nullable=False),
)

trajectories = sa.Table(
    "trajectories",
    metadata,
    sa.Column("id", TRAJECTORY_ID, primary_key=True),
    sa.Column("alias", sa.String(128), nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("purpose", sa.String(16), nullable=False),
    sa.Column("task", sa.Text),
    sa.Column("root_node", HASH, nullable=False),
    sa.Column("tools_hash", HASH, nullable=False),
    sa.Column("key_id", sa.String(64)),
    sa.Column("opened_at", TIME, nullable=False),
    sa.Column("last_active_at", TIME, nullable=False),
    sa.Column("sealed_at", TIME),
    sa.Column("sealed_by", sa.String(16)),
    sa.Column("group_id", ID, sa.ForeignKey("groups.id")),
    sa.Column("round_id", ID, sa.ForeignKey("rounds.id")),
    sa.Column("drop_reason", sa.Text),
    sa.Column("successors", sa.Integer, nullable=False, server_default="0"),
    # How its version was drawn (records/releases.py); null for a version that nothing drew.
    sa.Column("draw", sa.JSON(none_as_null=True)),
    # The draw is evidence about its versions.
    sa.Column("counted", sa.Boolean, nullable=False, server_default=sa.false()),
    enum_constraint("state", TrajectoryState),
    # A trained trajectory names the round that trained it; no other trajectory names a round.
    sa.CheckConstraint("(state = 'trained') = (round_id IS NOT NULL)", name="trained_once"),
    # A dropped trajectory has a reason.
    sa.CheckConstraint("(state = 'dropped') = (drop_reason IS NOT NULL)", name="drop_has_reason"),
    sa.Index(None, "state", "last_active_at"),
    sa.Index(None, "opened_at", "id"),
    # One index per filter of the lists, in the order of the lists.
    sa.Index(None, "state", "opened_at"),
    sa.Index(None, "alias", "opened_at"),
    sa.Index(None, "alias", "state", "opened_at"),
    sa.Index(None, "alias", "version", "opened_at"),
    sa.Index(None, "key_id", "opened_at"),
)
# Columns that most trajectories do not have, or not at their start.
for _columns in (("group_id",), ("round_id",), ("drop_reason",), ("task", "opened_at")):
    index_when_set(trajectories, *_columns)

# The tags of a trajectory's calls, each once; `opened_at` is the trajectory's, for the order of the lists.
trajectory_tags = sa.Table(
    "trajectory_tags",
    metadata,
    sa.Column("tag", sa.String(128), primary_key=True),
    sa.Column("opened_at", TIME, primary_key=True),
    sa.Column("trajectory_id", TRAJECTORY_ID, sa.ForeignKey("trajectories.id", ondelete="CASCADE"), primary_key=True),
    sa.Index(None, "trajectory_id"),
)

calls = sa.Table(
    "calls",
    metadata,
    sa.Column("id", CALL_ID, primary_key=True),
    sa.Column("trajectory_id", TRAJECTORY_ID, sa.ForeignKey("trajectories.id"), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("alias", sa.String(128), nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("dialect", sa.String(16), nullable=False),
    sa.Column("streamed", sa.Boolean, nullable=False),
    sa.Column("linked_by", sa.String(32), nullable=False),
    sa.Column("parent_call", CALL_ID),
    sa.Column("parent_choice", sa.Integer, nullable=False),
    sa.Column("key_id", sa.String(64)),
    sa.Column("role", sa.String(128)),
    sa.Column("tags", JSON, nullable=False),
    sa.Column("sampling", JSON, nullable=False),
    sa.Column("prompt_node", HASH, nullable=False),
    sa.Column("tools_hash", HASH, nullable=False),
    sa.Column("context", sa.String(8), nullable=False),
    sa.Column("prompt_blocks", Bytes),  # hashes of the blocks before `prompt_ids`; only of forks
    sa.Column("prompt_ids", Ids, nullable=False),
    sa.Column("prompt_tokens", sa.Integer, nullable=False),
    sa.Column("completion_tokens", sa.Integer, nullable=False),
    sa.Column("started_at", TIME, nullable=False),
    sa.Column("first_byte_at", TIME),
    sa.Column("ended_at", TIME),
    sa.Column("status", sa.Integer),
    sa.Column("upstream", sa.Text),
    sa.Column("untrainable", sa.Text),
    sa.Column("error", sa.Text),
    sa.Column("response_id", sa.String(128)),
    # The prompt's last message, unless a stored answer of the call follows and so retains it.
    sa.Column("retained_node", HASH),
    enum_constraint("state", CallState),
    sa.CheckConstraint("context IN ('root', 'exact', 'fork')", name="context_known"),
    sa.Index(None, "trajectory_id", "started_at"),
)
# Calls that retain a message themselves: a message that nothing retains may be deleted.
index_when_set(calls, "retained_node")
# Calls that were not answered are few and often queried.
index_where("ix_calls_unanswered", calls.c.state != "answered", calls.c.state, calls.c.id)
index_when_set(calls, "response_id")

# Blocks of 256 tokens of a trajectory's forked prompts, each stored once.
prompt_blocks = sa.Table(
    "prompt_blocks",
    metadata,
    sa.Column("trajectory_id", TRAJECTORY_ID, sa.ForeignKey("trajectories.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("digest", Bytes, primary_key=True),
    sa.Column("token_ids", Ids, nullable=False),
)

# One row per sampled answer of a call; most calls have one.
choices = sa.Table(
    "choices",
    metadata,
    sa.Column("call_id", CALL_ID, sa.ForeignKey("calls.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("choice", sa.Integer, primary_key=True),
    sa.Column("finish_reason", sa.String(32)),
    sa.Column("reply_node", HASH, nullable=False),
    sa.Column("link_key", HASH, nullable=False),
    sa.Column("skip_last_key", HASH),
    sa.Column("tool_call_ids", JSON, nullable=False),
    sa.Column("token_ids", Ids, nullable=False),
    sa.Column("logprobs", Bytes, nullable=False),
    # Answers that retain a message, as above.
    sa.Index(None, "reply_node"),
)

# One row per sampled tool call, checked against the tools of its request.
tool_calls = sa.Table(
    "tool_calls",
    metadata,
    sa.Column("call_id", CALL_ID, sa.ForeignKey("calls.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("choice", sa.Integer, primary_key=True),
    sa.Column("place", sa.Integer, primary_key=True),
    sa.Column("alias", sa.String(128), nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("tool", sa.Text, nullable=False),
    sa.Column("tool_call_id", sa.Text, nullable=False),
    sa.Column("outcome", sa.String(24), nullable=False),
    sa.Column("result", sa.String(16)),
    sa.Column("detail", sa.Text),
    enum_constraint("outcome", ToolOutcome),
    enum_constraint("result", ToolResult),
    sa.Index(None, "alias", "version", "tool"),
)

# Feedback is only added. Its trajectory, its call and `applied_at` are set once.
feedback = sa.Table(
    "feedback",
    metadata,
    sa.Column("id", CALL_ID, primary_key=True),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("target", sa.String(256), nullable=False),
    sa.Column("source", sa.String(256), nullable=False),
    sa.Column("given_at", TIME, nullable=False),
    sa.Column("key_id", sa.String(64)),
    sa.Column("trusted", sa.Boolean, nullable=False),
    sa.Column("value", sa.Double),
    sa.Column("comment", sa.Text, nullable=False),
    sa.Column("demonstration", sa.Text),
    sa.Column("trajectory_id", TRAJECTORY_ID, sa.ForeignKey("trajectories.id", ondelete="CASCADE")),
    sa.Column("call_id", CALL_ID),
    sa.Column("applied_at", TIME),
    sa.Index(None, "trajectory_id", "given_at"),
    sa.Index(None, "given_at", "id"),
)
# Feedback that waits for its call, or for a judge, is rare and often queried.
index_where("ix_feedback_unmatched", feedback.c.trajectory_id.is_(None), feedback.c.target)
_unapplied = sa.and_(feedback.c.applied_at.is_(None), feedback.c.value.is_not(None))
index_where("ix_feedback_unapplied", _unapplied, feedback.c.trajectory_id)

resamples = sa.Table(
    "resamples",
    metadata,
    sa.Column("id", TRAJECTORY_ID, primary_key=True),
    sa.Column("original_id", TRAJECTORY_ID, sa.ForeignKey("trajectories.id", ondelete="CASCADE"), nullable=False),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("alias", sa.String(128), nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("tokens", sa.Integer, nullable=False),
    sa.Column("planned_at", TIME, nullable=False),
    sa.Column("requested_at", TIME),
    sa.Column("ended_at", TIME),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("failure", sa.Text),
    enum_constraint("state", ResampleState),
    # An original has one set of resamples: planning twice does not add a second set.
    sa.UniqueConstraint("original_id", "number"),
    # An ended resample has an end time; only a failed one has a reason.
    sa.CheckConstraint("(state IN ('answered', 'failed')) = (ended_at IS NOT NULL)", name="end_is_known"),
    sa.CheckConstraint("(state = 'failed') = (failure IS NOT NULL)", name="failure_has_reason"),
    sa.Index(None, "alias", "requested_at"),
)

# Tables of training: groups, verdicts, judge requests, rounds and what they trained on.
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
index_where("uq_rounds_started", rounds.c.state == "started", rounds.c.alias, unique=True)

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

# Tables of the tuner: tasks, runs and their rollouts.
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

# Tables of operation: proxies, leases, alarms, API keys, audit log and deletions.
proxy_instances = sa.Table(
    "proxy_instances",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("url", sa.Text, nullable=False),
    sa.Column("live_versions", JSON, nullable=False),
    sa.Column("pinned_trajectories", JSON, nullable=False),
    sa.Column("shipped_until", TIME, nullable=False),
    sa.Column("heartbeat_at", TIME, nullable=False),
)

# A lease has one owner until it expires; the owner renews it.
leases = sa.Table(
    "leases",
    metadata,
    sa.Column("name", sa.String(128), primary_key=True),
    sa.Column("owner", sa.String(128), nullable=False),
    sa.Column("expires_at", TIME, nullable=False),
)

alarms = sa.Table(
    "alarms",
    metadata,
    sa.Column("name", sa.String(128), primary_key=True),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("raised_at", TIME, nullable=False),
    sa.Column("last_raised_at", TIME, nullable=False),
    sa.Column("count", sa.Integer, nullable=False),
    sa.Column("cleared_at", TIME),
    sa.Column("sent_at", TIME),
)

# A key is stored by its SHA-256; two rows with one hash would be two limits for one key.
keys = sa.Table(
    "keys",
    metadata,
    sa.Column("id", ID, primary_key=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("hash", sa.String(64), nullable=False, unique=True),
    sa.Column("scope", sa.String(16), nullable=False),
    sa.Column("created_at", TIME, nullable=False),
    sa.Column("revoked_at", TIME),
    sa.Column("last_used_at", TIME),
    sa.Column("requests_per_minute", sa.Integer),
    sa.Column("tokens_per_minute", sa.Integer),
    sa.Column("agents", JSON),  # names of the agents that it may call; NULL: all
    sa.Column("max_parallel_requests", sa.Integer),
    sa.Column("expires_at", TIME),
    sa.Column("models", JSON),  # names in model_list that it may call; NULL: all
    sa.Column("max_tokens", sa.Integer),
    sa.Column("tokens_per_day", sa.BigInteger),
    sa.Column("tokens_per_month", sa.BigInteger),
    enum_constraint("scope", KeyScope),
    # A limit of 0 would be a revoked key.
    sa.CheckConstraint(
        "requests_per_minute > 0 AND tokens_per_minute > 0 AND max_parallel_requests > 0 "
        "AND max_tokens > 0 AND tokens_per_day > 0 AND tokens_per_month > 0",
        name="positive_limits",
    ),
)

# What keys used, by UTC day (2026-11-23), key ("": none), agent or model, and purpose; without content.
usage = sa.Table(
    "usage",
    metadata,
    sa.Column("day", sa.String(10), primary_key=True),
    sa.Column("key_id", sa.String(64), primary_key=True),
    sa.Column("alias", sa.String(128), primary_key=True),
    sa.Column("purpose", sa.String(16), primary_key=True),
    sa.Column("calls", sa.BigInteger, nullable=False),
    sa.Column("failed", sa.BigInteger, nullable=False),
    sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
    sa.Column("completion_tokens", sa.BigInteger, nullable=False),
    sa.Index(None, "key_id", "day"),
)

# What operators read and changed. A change has its row before it happens; status is NULL until the outcome is known.
audit_entries = sa.Table(
    "audit_entries",
    metadata,
    sa.Column("id", CALL_ID, primary_key=True),
    sa.Column("at", TIME, nullable=False),
    sa.Column("last_at", TIME, nullable=False, index=True),
    sa.Column("count", sa.Integer, nullable=False),
    sa.Column("actor", sa.Text, nullable=False),
    sa.Column("method", sa.String(8), nullable=False),
    sa.Column("route", sa.Text, nullable=False),
    sa.Column("target", JSON, nullable=False),
    sa.Column("key_id", ID),
    sa.Column("client", sa.String(64)),
    sa.Column("status", sa.Integer),
)

# Deletions, without the deleted content; proxies learn from them that messages may be gone.
deletions = sa.Table(
    "deletions",
    metadata,
    sa.Column("id", ID, primary_key=True),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("started_at", TIME, nullable=False),
    sa.Column("updated_at", TIME, nullable=False),
    sa.Column("trajectory_count", sa.Integer, nullable=False),
    sa.Column("call_count", sa.Integer, nullable=False),
    sa.Column("policies", JSON, nullable=False),
)

# Messages and tool lists that a deleted call named; the sweep deletes those that no other call names.
orphan_candidates = sa.Table("orphan_candidates", metadata, sa.Column("hash", HASH, primary_key=True))
