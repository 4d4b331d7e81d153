"""The tables. Each uniqueness rule is a database constraint with the rule's sentence above it.

Migrations live in `store/migrations`; a test proves that they lead to exactly these tables.
"""

from __future__ import annotations

import sqlalchemy as sa

from ratchet.store.db.column_types import Body, Bytes, Ids
from ratchet.store.db.table_types import CALL_ID as _CALL_ID
from ratchet.store.db.table_types import HASH as _HASH
from ratchet.store.db.table_types import ID as _ID
from ratchet.store.db.table_types import JSON as _JSON
from ratchet.store.db.table_types import TIME as _TIME
from ratchet.store.db.table_types import TRAJECTORY_ID as _TRAJECTORY_ID
from ratchet.store.db.table_types import index_when_set as _index_said
from ratchet.store.db.table_types import metadata as metadata
from ratchet.store.db.table_types import one_of as _state
from ratchet.store.states import (
    CallState,
    GroupState,
    KeyScope,
    PolicyState,
    RoundState,
    ToolOutcome,
    ToolResult,
    TrajectoryState,
)

# A message is stored once, whoever says it: its hash covers its parent and its content.
messages = sa.Table(
    "messages",
    metadata,
    sa.Column("hash", _HASH, primary_key=True),
    sa.Column("parent", _HASH, nullable=False),
    sa.Column("role", sa.String(32), nullable=False),
    sa.Column("body", Body, nullable=False),
    sa.Index(None, "parent"),
)

# A tool list is stored once.
toolsets = sa.Table(
    "toolsets",
    metadata,
    sa.Column("hash", _HASH, primary_key=True),
    sa.Column("body", Body, nullable=False),
)

trajectories = sa.Table(
    "trajectories",
    metadata,
    sa.Column("id", _TRAJECTORY_ID, primary_key=True),
    sa.Column("alias", sa.String(128), nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("purpose", sa.String(16), nullable=False),
    sa.Column("task", sa.Text),
    sa.Column("root_node", _HASH, nullable=False),
    sa.Column("tools_hash", _HASH, nullable=False),
    sa.Column("key_id", sa.String(64)),
    sa.Column("opened_at", _TIME, nullable=False),
    sa.Column("last_active_at", _TIME, nullable=False),
    sa.Column("sealed_at", _TIME),
    sa.Column("sealed_by", sa.String(16)),
    sa.Column("group_id", _ID, sa.ForeignKey("groups.id")),
    sa.Column("round_id", _ID, sa.ForeignKey("rounds.id")),
    sa.Column("drop_reason", sa.Text),
    sa.Column("successors", sa.Integer, nullable=False, server_default="0"),
    _state("state", TrajectoryState),
    # A trained trajectory names the one round that trained it; no other trajectory names any.
    sa.CheckConstraint("(state = 'trained') = (round_id IS NOT NULL)", name="trained_once"),
    # A dropped trajectory has a reason.
    sa.CheckConstraint("(state = 'dropped') = (drop_reason IS NOT NULL)", name="drop_has_reason"),
    sa.Index(None, "state", "last_active_at"),
    sa.Index(None, "opened_at", "id"),
    # One index per filter of the lists, each in the lists' own order.
    sa.Index(None, "state", "opened_at"),
    sa.Index(None, "alias", "opened_at"),
    sa.Index(None, "alias", "state", "opened_at"),
    sa.Index(None, "alias", "version", "opened_at"),
    sa.Index(None, "key_id", "opened_at"),
)
# What most trajectories do not have, or not when they begin, is in no index until it is there.
for _columns in (("group_id",), ("round_id",), ("drop_reason",), ("task", "opened_at")):
    _index_said(trajectories, *_columns)

# The tags of a trajectory's calls, each once; `opened_at` repeats the trajectory's, for the order of the lists.
tags = sa.Table(
    "tags",
    metadata,
    sa.Column("tag", sa.String(128), primary_key=True),
    sa.Column("opened_at", _TIME, primary_key=True),
    sa.Column("trajectory_id", _TRAJECTORY_ID, sa.ForeignKey("trajectories.id", ondelete="CASCADE"), primary_key=True),
    sa.Index(None, "trajectory_id"),
)

calls = sa.Table(
    "calls",
    metadata,
    sa.Column("id", _CALL_ID, primary_key=True),
    sa.Column("trajectory_id", _TRAJECTORY_ID, sa.ForeignKey("trajectories.id"), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("alias", sa.String(128), nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("dialect", sa.String(16), nullable=False),
    sa.Column("streamed", sa.Boolean, nullable=False),
    sa.Column("linked_by", sa.String(32), nullable=False),
    sa.Column("parent_call", _CALL_ID),
    sa.Column("parent_choice", sa.Integer, nullable=False),
    sa.Column("key_id", sa.String(64)),
    sa.Column("role", sa.String(128)),
    sa.Column("tags", _JSON, nullable=False),
    sa.Column("sampling", _JSON, nullable=False),
    sa.Column("prompt_node", _HASH, nullable=False),
    sa.Column("tools_hash", _HASH, nullable=False),
    sa.Column("context", sa.String(8), nullable=False),
    sa.Column("prompt_blocks", Bytes),  # what comes before `prompt_ids`, by name; only of forks
    sa.Column("prompt_ids", Ids, nullable=False),
    sa.Column("prompt_tokens", sa.Integer, nullable=False),
    sa.Column("completion_tokens", sa.Integer, nullable=False),
    sa.Column("started_at", _TIME, nullable=False),
    sa.Column("first_byte_at", _TIME),
    sa.Column("ended_at", _TIME),
    sa.Column("status", sa.Integer),
    sa.Column("upstream", sa.Text),
    sa.Column("untrainable", sa.Text),
    sa.Column("error", sa.Text),
    sa.Column("answer_id", sa.String(128)),
    # The prompt's last message, where no stored answer of the call stands under it and so keeps it.
    sa.Column("retained_node", _HASH),
    _state("state", CallState),
    sa.CheckConstraint("context IN ('root', 'exact', 'fork')", name="context_known"),
    sa.Index(None, "trajectory_id", "started_at"),
)
# Which calls keep a message by themselves: one that nothing keeps may be deleted.
_index_said(calls, "retained_node")
# The calls that were not answered are few and often asked for.
sa.Index("ix_calls_unanswered", calls.c.state, calls.c.id,
         sqlite_where=calls.c.state != "answered", postgresql_where=calls.c.state != "answered")  # fmt: skip
_index_said(calls, "answer_id")

# 256 tokens of the prompts of a trajectory's forks, once.
blocks = sa.Table(
    "blocks",
    metadata,
    sa.Column("trajectory_id", _TRAJECTORY_ID, sa.ForeignKey("trajectories.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("digest", Bytes, primary_key=True),
    sa.Column("ids", Ids, nullable=False),
)

# One row per sampled answer of a call; most calls have one.
choices = sa.Table(
    "choices",
    metadata,
    sa.Column("call_id", _CALL_ID, sa.ForeignKey("calls.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("choice", sa.Integer, primary_key=True),
    sa.Column("finish_reason", sa.String(32)),
    sa.Column("reply_node", _HASH, nullable=False),
    sa.Column("link_key", _HASH, nullable=False),
    sa.Column("tool_call_ids", _JSON, nullable=False),
    sa.Column("ids", Ids, nullable=False),
    sa.Column("logprobs", Bytes, nullable=False),
    # Which answers are a message: as above.
    sa.Index(None, "reply_node"),
)

# One row per tool call that a model sampled, held against the tools of its own request; a row is never counted twice.
tool_calls = sa.Table(
    "tool_calls",
    metadata,
    sa.Column("call_id", _CALL_ID, sa.ForeignKey("calls.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("choice", sa.Integer, primary_key=True),
    sa.Column("place", sa.Integer, primary_key=True),
    sa.Column("alias", sa.String(128), nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("tool", sa.Text, nullable=False),
    sa.Column("tool_call_id", sa.Text, nullable=False),
    sa.Column("outcome", sa.String(24), nullable=False),
    sa.Column("result", sa.String(16)),
    sa.Column("detail", sa.Text),
    _state("outcome", ToolOutcome),
    _state("result", ToolResult),
    sa.Index(None, "alias", "version", "tool"),
)

groups = sa.Table(
    "groups",
    metadata,
    sa.Column("id", _ID, primary_key=True),
    sa.Column("key", sa.Text, nullable=False),
    sa.Column("alias", sa.String(128), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("formed_at", _TIME, nullable=False),
    sa.Column("failures", sa.Integer, nullable=False, server_default="0"),
    sa.Column("retry_at", _TIME),
    sa.Column("drop_reason", sa.Text),
    _state("state", GroupState),
    sa.CheckConstraint("(state = 'dropped') = (drop_reason IS NOT NULL)", name="drop_has_reason"),
    sa.Index(None, "state", "formed_at"),
)

# Verdicts are only ever added; the latest one of a trajectory counts.
verdicts = sa.Table(
    "verdicts",
    metadata,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("trajectory_id", _TRAJECTORY_ID, sa.ForeignKey("trajectories.id"), nullable=False),
    sa.Column("group_id", _ID, sa.ForeignKey("groups.id")),
    sa.Column("judge", sa.Text, nullable=False),
    sa.Column("judge_version", sa.String(64), nullable=False),
    sa.Column("score", sa.Double),
    sa.Column("failure", sa.Text),
    sa.Column("explanation", sa.Text, nullable=False),
    sa.Column("components", _JSON, nullable=False),
    sa.Column("cost", sa.Double),
    sa.Column("latency", sa.Double, nullable=False),
    sa.Column("judged_at", _TIME, nullable=False),
    sa.Column("judge_request_id", _ID),
    sa.Column("baseline_mean", sa.Double),
    sa.Column("baseline_std", sa.Double),
    # A judge failure is a state, never a number: a verdict has a score or a failure, not both, not neither.
    sa.CheckConstraint("(score IS NULL) <> (failure IS NULL)", name="score_or_failure"),
    sa.Index(None, "trajectory_id", "id"),
    sa.Index(None, "group_id"),
)

# What was said is only ever added. Where it belongs and when a judge heard it are noted beside it, once.
feedback = sa.Table(
    "feedback",
    metadata,
    sa.Column("id", _CALL_ID, primary_key=True),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("target", sa.String(256), nullable=False),
    sa.Column("source", sa.String(256), nullable=False),
    sa.Column("given_at", _TIME, nullable=False),
    sa.Column("key_id", sa.String(64)),
    sa.Column("trusted", sa.Boolean, nullable=False),
    sa.Column("value", sa.Double),
    sa.Column("comment", sa.Text, nullable=False),
    sa.Column("demonstration", sa.Text),
    sa.Column("trajectory_id", _TRAJECTORY_ID, sa.ForeignKey("trajectories.id", ondelete="CASCADE")),
    sa.Column("call_id", _CALL_ID),
    sa.Column("heard_at", _TIME),
    sa.Index(None, "trajectory_id", "given_at"),
    sa.Index(None, "given_at", "id"),
)
# What waits for its call, and what waits for a judge, are few and often asked for.
sa.Index("ix_feedback_waiting", feedback.c.target,
         sqlite_where=feedback.c.trajectory_id.is_(None),
         postgresql_where=feedback.c.trajectory_id.is_(None))  # fmt: skip
sa.Index("ix_feedback_unapplied", feedback.c.trajectory_id,
         sqlite_where=sa.and_(feedback.c.heard_at.is_(None), feedback.c.value.is_not(None)),
         postgresql_where=sa.and_(feedback.c.heard_at.is_(None), feedback.c.value.is_not(None)))  # fmt: skip

exchanges = sa.Table(
    "exchanges",
    metadata,
    sa.Column("id", _ID, primary_key=True),
    sa.Column("group_id", _ID, sa.ForeignKey("groups.id")),
    sa.Column("judge", sa.Text, nullable=False),
    sa.Column("url", sa.Text, nullable=False),
    sa.Column("request", Bytes, nullable=False),
    sa.Column("answer", Bytes, nullable=False),
    sa.Column("status", sa.Integer, nullable=False),
    sa.Column("problem", sa.Text),
    sa.Column("prompt_tokens", sa.Integer, nullable=False),
    sa.Column("completion_tokens", sa.Integer, nullable=False),
    sa.Column("cost", sa.Double),
    sa.Column("latency", sa.Double, nullable=False),
    sa.Column("asked_at", _TIME, nullable=False),
    sa.Index(None, "group_id", "id"),
)

rounds = sa.Table(
    "rounds",
    metadata,
    sa.Column("id", _ID, primary_key=True),
    sa.Column("alias", sa.String(128), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("from_version", sa.Integer, nullable=False),
    sa.Column("to_version", sa.Integer),
    sa.Column("started_at", _TIME, nullable=False),
    sa.Column("ended_at", _TIME),
    sa.Column("checkpoint", sa.Text),
    sa.Column("metrics", _JSON, nullable=False),
    sa.Column("reason", sa.Text),
    _state("state", RoundState),
    # A committed round has written a checkpoint and made a version.
    sa.CheckConstraint(
        "state <> 'committed' OR (checkpoint IS NOT NULL AND to_version IS NOT NULL)", name="commit_is_whole"
    ),
    sa.Index(None, "alias", "started_at"),
)
# At most one round of an alias is under way.
sa.Index("uq_rounds_started", rounds.c.alias, unique=True, sqlite_where=rounds.c.state == "started",
         postgresql_where=rounds.c.state == "started")  # fmt: skip

# What a round imitated without consuming it: it may be trained besides, by other rounds.
imitated = sa.Table(
    "imitated",
    metadata,
    sa.Column("round_id", _ID, sa.ForeignKey("rounds.id"), primary_key=True),
    sa.Column("trajectory_id", _TRAJECTORY_ID, sa.ForeignKey("trajectories.id", ondelete="CASCADE"), primary_key=True),
    sa.Index(None, "trajectory_id"),
)

policies = sa.Table(
    "policies",
    metadata,
    sa.Column("alias", sa.String(128), primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("served_name", sa.Text, nullable=False),
    sa.Column("adapter", sa.Text),
    sa.Column("created_at", _TIME, nullable=False),
    sa.Column("round_id", _ID, sa.ForeignKey("rounds.id")),
    sa.Column("evidence", _JSON, nullable=False),
    sa.Column("share", sa.Double),
    sa.Column("pruned_at", _TIME),
    sa.Column("prompt_id", _ID, sa.ForeignKey("prompts.id")),
    sa.Column("base_id", _ID, sa.ForeignKey("base_models.id")),
    _state("state", PolicyState),
    # Version 0 is the base model as it is; every other version has an adapter, a prompt or both.
    sa.CheckConstraint("(version = 0) = (adapter IS NULL AND prompt_id IS NULL)", name="base_serves_as_it_is"),
)
# At most one version of an alias is live.
sa.Index("uq_policies_live", policies.c.alias, unique=True, sqlite_where=policies.c.state == "live",
         postgresql_where=policies.c.state == "live")  # fmt: skip

# At most one version of an alias is a canary.
sa.Index("uq_policies_canary", policies.c.alias, unique=True, sqlite_where=policies.c.state == "canary",
         postgresql_where=policies.c.state == "canary")  # fmt: skip

# What was deleted and when, without its content; proxies see by it that messages may have gone.
deletions = sa.Table(
    "deletions",
    metadata,
    sa.Column("id", _ID, primary_key=True),
    sa.Column("why", sa.Text, nullable=False),
    sa.Column("started_at", _TIME, nullable=False),
    sa.Column("last_at", _TIME, nullable=False),
    sa.Column("trajectories", sa.Integer, nullable=False),
    sa.Column("calls", sa.Integer, nullable=False),
    sa.Column("policies", _JSON, nullable=False),
)

# Messages and tool lists that a deleted call named: the sweep looks whether anybody else does.
orphan_candidates = sa.Table("orphan_candidates", metadata, sa.Column("hash", _HASH, primary_key=True))

# A lease is held by one owner until it expires; the holder renews it.
leases = sa.Table(
    "leases",
    metadata,
    sa.Column("name", sa.String(128), primary_key=True),
    sa.Column("owner", sa.String(128), nullable=False),
    sa.Column("expires_at", _TIME, nullable=False),
)

doors = sa.Table(
    "doors",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("url", sa.Text, nullable=False),
    sa.Column("live", _JSON, nullable=False),
    sa.Column("pins", _JSON, nullable=False),
    sa.Column("shipped_until", _TIME, nullable=False),
    sa.Column("heartbeat_at", _TIME, nullable=False),
)

alarms = sa.Table(
    "alarms",
    metadata,
    sa.Column("name", sa.String(128), primary_key=True),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("raised_at", _TIME, nullable=False),
    sa.Column("last_at", _TIME, nullable=False),
    sa.Column("count", sa.Integer, nullable=False),
    sa.Column("cleared_at", _TIME),
)

# A key is known by its SHA-256; two rows with one hash would be two limits for one key.
keys = sa.Table(
    "keys",
    metadata,
    sa.Column("id", _ID, primary_key=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("hash", sa.String(64), nullable=False, unique=True),
    sa.Column("scope", sa.String(16), nullable=False),
    sa.Column("created_at", _TIME, nullable=False),
    sa.Column("revoked_at", _TIME),
    sa.Column("last_used_at", _TIME),
    sa.Column("requests_per_minute", sa.Integer),
    sa.Column("tokens_per_minute", sa.Integer),
    _state("scope", KeyScope),
    # A limit of nothing would be a revoked key under another name.
    sa.CheckConstraint("requests_per_minute > 0 AND tokens_per_minute > 0", name="limits_let_something_in"),
)
