"""Tables of recorded traffic: messages, trajectories, calls, answers, tool calls and feedback."""

from __future__ import annotations

import sqlalchemy as sa

from ratchet.store.db.column_types import Body, Bytes, Ids, pack_hash
from ratchet.store.db.table_types import (
    CALL_ID,
    HASH,
    ID,
    JSON,
    TIME,
    TRAJECTORY_ID,
    enum_constraint,
    index_when_set,
    metadata,
)
from ratchet.store.states import CallState, ResampleState, ToolOutcome, ToolResult, TrajectoryState

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
sa.Index("ix_calls_unanswered", calls.c.state, calls.c.id,
         sqlite_where=calls.c.state != "answered", postgresql_where=calls.c.state != "answered")  # fmt: skip
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
sa.Index("ix_feedback_unmatched", feedback.c.target,
         sqlite_where=feedback.c.trajectory_id.is_(None),
         postgresql_where=feedback.c.trajectory_id.is_(None))  # fmt: skip
sa.Index("ix_feedback_unapplied", feedback.c.trajectory_id,
         sqlite_where=sa.and_(feedback.c.applied_at.is_(None), feedback.c.value.is_not(None)),
         postgresql_where=sa.and_(feedback.c.applied_at.is_(None), feedback.c.value.is_not(None)))  # fmt: skip

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
