"""Every table of the store, made from the records that are its rows.

Each uniqueness rule is a database constraint with the rule above it. Until the first release the database is created
from these tables, and a change of them needs another `engine.HEAD`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import sqlalchemy as sa

from ratchet.store import operation_records as operation
from ratchet.store import records
from ratchet.store.db import column_types
from ratchet.store.db.column_types import pack_hash
from ratchet.store.records import BigInt, Body, CallId, Hash, Id, Ids, Record, Text16, Text64, Text128, TrajectoryId
from ratchet.store.states import SERVING

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# The forms that a field's type names. Ids are compared by bytes in every locale, so that they sort by time and pages
# follow ids.
_FORMS: Mapping[str, Any] = {
    "call id": sa.String(40).with_variant(sa.String(40, collation="C"), "postgresql"),
    "trajectory id": sa.String(128).with_variant(sa.String(128, collation="C"), "postgresql"),
    "hash": column_types.Hash,
    "body": column_types.Body,
    "token ids": column_types.Ids,
    "bigint": sa.BigInteger,
}
_PLAIN: Mapping[Any, Any] = {
    str: sa.Text, int: sa.Integer, float: sa.Double, bool: sa.Boolean, bytes: column_types.Bytes,
}  # fmt: skip
_COUNTER = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def table_of(
    name: str,
    record: type[Record] | None,
    *indexes: str,
    key: str = "id",
    references: Mapping[str, str] | None = None,
    checks: Mapping[str, str] | None = None,
    unique: str | None = None,
    defaults: Mapping[str, Any] | None = None,
    left_out: Sequence[str] = (),
    before: Mapping[str, Mapping[str, Any]] | None = None,
    **further: Any,
) -> sa.Table:
    """Return the table whose columns are a record's fields, without those `left_out`, and the `further` ones.

    `before`: further columns that stand before a field. Several columns of an index or key are separated by blanks;
    a reference is the other table's name, with a ! if a row is deleted with the one that it refers to.
    """
    hints: dict[str, Any] = {}
    fields = get_type_hints(record, include_extras=True) if record else {}
    for field in record.__struct_fields__ if record else ():
        hints |= (before or {}).get(field, {})
        hints |= {} if field in left_out else {field: fields[field]}
    keys = key.split()
    columns: list[sa.Column[Any]] = []
    rules: list[sa.CheckConstraint] = []
    for column, hint in (hints | further).items():
        kind, states, optional = _kind_of(hint)
        links = [_reference(references[column])] if references and column in references else []
        is_counter = key == column and kind is sa.Integer
        default = (defaults or {}).get(column)
        columns.append(
            sa.Column(
                column, _COUNTER if is_counter else kind, *links, primary_key=column in keys,
                nullable=optional, server_default=default, autoincrement=is_counter,
            )
        )  # fmt: skip
        rules += [_known(column, states)] if states else []
    rules += [sa.CheckConstraint(rule, name=named) for named, rule in (checks or {}).items()]
    uniques = [sa.UniqueConstraint(*unique.split())] if unique else []
    return sa.Table(name, metadata, *columns, *rules, *uniques, *(sa.Index(None, *one.split()) for one in indexes))


def _kind_of(hint: Any) -> tuple[Any, type[StrEnum] | None, bool]:
    """Return a column's type, its states if they are listed, and whether it may be null."""
    options = get_args(hint) if get_origin(hint) in (UnionType, Union) else (hint,)
    kind, optional = next(one for one in options if one is not NoneType), len(options) > 1
    form = None
    if get_origin(kind) is Annotated:
        kind, form = get_args(kind)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return sa.String(form or 16), kind, optional
    if form is not None:
        return _FORMS[form] if isinstance(form, str) else sa.String(form), None, optional
    return _PLAIN.get(kind) or sa.JSON(none_as_null=optional), None, optional


def _reference(other: str) -> sa.ForeignKey:
    return sa.ForeignKey(f"{other.rstrip('!')}.id", ondelete="CASCADE" if other.endswith("!") else None)


def _known(column: str, states: type[StrEnum]) -> sa.CheckConstraint:
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
base_models = table_of("base_models", records.BaseModel)
prompts = table_of("prompts", records.Prompt, "created_at id")
policies = table_of(
    "policies",
    records.Policy,
    key="alias version",
    references={"round_id": "rounds", "prompt_id": "prompts", "base_model_id": "base_models"},
    before={"replicas": {"base_model_id": Id | None}},
    defaults={"replicas": "[]"},
    checks={
        # Only versions beside the live one have a share; the live one has the rest.
        "share_beside_live": "(share IS NOT NULL) = (state IN ('ramp', 'holdback'))",
        "pinned_is_live": "pinned_at IS NULL OR state = 'live'",
        # Version 0 is the base model; every other version has an adapter, a prompt or both.
        "base_version_has_no_adapter": "(version = 0) = (adapter IS NULL AND prompt_id IS NULL)",
    },
)
# At most one version of an alias is live, one is in its ramp and one is held back.
for _state in SERVING:
    index_where(f"uq_policies_{_state}", policies.c.state == _state.value, policies.c.alias, unique=True)

# What the release controller knows about a version: its evidence, for people and for the controller after a restart.
releases = table_of("releases", records.ReleaseEvidence, key="alias version")
# Decisions are only added; the newest one of a version counts.
decisions = table_of("decisions", records.Decision, "alias version id")
for _table in (releases, decisions):
    _table.append_constraint(sa.ForeignKeyConstraint(["alias", "version"], ["policies.alias", "policies.version"]))

# Tables of recorded traffic: messages, trajectories, calls, answers, tool calls and feedback.
# The condition, by dialect, that a message follows nothing or a system prompt, whose hash begins with four zero bytes.
_OTHERS = pack_hash("b2:00000001").hex()
SHARED_PARENT = {
    "sqlite": sa.text(f"parent < x'{_OTHERS}'"),
    "postgresql": sa.text(f"parent < '\\x{_OTHERS}'::bytea"),
}
# A message is stored once: its hash covers its parent and its content.
messages = table_of("messages", records.MessageNode, key="hash")
# The messages that follow any other one are in a range of the primary key: `conversation_range`.
sa.Index(
    "ix_messages_shared_parent", messages.c.parent,
    sqlite_where=SHARED_PARENT["sqlite"], postgresql_where=SHARED_PARENT["postgresql"],
)  # fmt: skip
# A tool list is stored once.
toolsets = table_of("toolsets", None, key="hash", hash=Hash, body=Body)

trajectories = table_of(
    "trajectories",
    records.Trajectory,
    "state last_active_at",
    "opened_at id",
    # One index per filter of the lists, in the order of the lists.
    "state opened_at",
    "alias opened_at",
    "alias state opened_at",
    "alias version opened_at",
    "key_id opened_at",
    references={"group_id": "groups", "round_id": "rounds"},
    left_out=("calls",),
    before={"draw": {"successors": int}},
    counted=bool,  # the draw is evidence about its versions
    defaults={"successors": "0", "counted": sa.false()},
    checks={
        # A trained trajectory names the round that trained it; no other trajectory names a round.
        "trained_once": "(state = 'trained') = (round_id IS NOT NULL)",
        "drop_has_reason": "(state = 'dropped') = (drop_reason IS NOT NULL)",
    },
)
# Columns that most trajectories do not have, or not at their start.
for _columns in (("group_id",), ("round_id",), ("drop_reason",), ("task", "opened_at")):
    index_when_set(trajectories, *_columns)

# The tags of a trajectory's calls, each once; `opened_at` is the trajectory's, for the order of the lists.
trajectory_tags = table_of(
    "trajectory_tags", None, "trajectory_id", key="tag opened_at trajectory_id",
    references={"trajectory_id": "trajectories!"}, tag=Text128, opened_at=float, trajectory_id=TrajectoryId,
)  # fmt: skip

calls = table_of(
    "calls",
    records.Call,
    "trajectory_id started_at",
    references={"trajectory_id": "trajectories"},
    left_out=("choices",),
    before={
        "role": {"key_id": Text64 | None},
        "sampling": {"tags": tuple},
        "prompt_ids": {"prompt_blocks": bytes | None},  # hashes of the blocks before `prompt_ids`; only of forks
        "untrainable": {"upstream": str | None},
    },
    # The prompt's last message, unless a stored answer of the call follows and so retains it.
    retained_node=Hash | None,
    checks={"context_known": "context IN ('root', 'exact', 'fork')"},
)
# Calls that retain a message themselves: a message that nothing retains may be deleted.
index_when_set(calls, "retained_node")
# Calls that were not answered are few and often queried.
index_where("ix_calls_unanswered", calls.c.state != "answered", calls.c.state, calls.c.id)
index_when_set(calls, "response_id")

# Blocks of 256 tokens of a trajectory's forked prompts, each stored once.
prompt_blocks = table_of(
    "prompt_blocks", None, key="trajectory_id digest", references={"trajectory_id": "trajectories!"},
    trajectory_id=TrajectoryId, digest=bytes, token_ids=Ids,
)  # fmt: skip
# One row per sampled answer of a call; most calls have one. `reply_node`: the message that it retains, as above.
choices = table_of(
    "choices", records.Choice, "reply_node", key="call_id choice", references={"call_id": "calls!"},
    left_out=("index",), before={"index": {"call_id": CallId, "choice": int}},
)  # fmt: skip
# One row per sampled tool call, checked against the tools of its request.
tool_calls = table_of(
    "tool_calls", records.ToolCall, "alias version tool", key="call_id choice place", references={"call_id": "calls!"}
)

# Feedback is only added. Its trajectory, its call and `applied_at` are set once.
feedback = table_of(
    "feedback", records.Feedback, "trajectory_id given_at", "given_at id",
    references={"trajectory_id": "trajectories!"},
)  # fmt: skip
# Feedback that waits for its call, or for a judge, is rare and often queried.
index_where("ix_feedback_unmatched", feedback.c.trajectory_id.is_(None), feedback.c.target)
_unapplied = sa.and_(feedback.c.applied_at.is_(None), feedback.c.value.is_not(None))
index_where("ix_feedback_unapplied", _unapplied, feedback.c.trajectory_id)

resamples = table_of(
    "resamples",
    records.Resample,
    "alias requested_at",
    references={"original_id": "trajectories!"},
    before={"alias": {"number": int}},
    # An original has one set of resamples: planning twice does not add a second set.
    unique="original_id number",
    checks={
        "end_is_known": "(state IN ('answered', 'failed')) = (ended_at IS NOT NULL)",
        "failure_has_reason": "(state = 'failed') = (failure IS NOT NULL)",
    },
)

# Tables of training: groups, verdicts, judge requests, rounds and what they trained on.
groups = table_of(
    "groups",
    records.Group,
    "state formed_at",
    left_out=("members", "initial_size"),
    before={"drop_reason": {"retry_at": float | None}},
    defaults={"failures": "0"},
    checks={"drop_has_reason": "(state = 'dropped') = (drop_reason IS NOT NULL)"},
)
# Verdicts are only added; the latest one of a trajectory counts.
verdicts = table_of(
    "verdicts",
    records.Verdict,
    "trajectory_id id",
    "group_id",
    before={"trajectory_id": {"id": int}},
    references={"trajectory_id": "trajectories", "group_id": "groups"},
    # A judge failure is never a number: a verdict has either a score or a failure.
    checks={"score_or_failure": "(score IS NULL) <> (failure IS NULL)"},
)
# The newest score of a teacher, by trajectory: the logprobs of its sampled tokens, compressed.
teacher_scores = table_of(
    "teacher_scores", records.TeacherScore, key="trajectory_id", references={"trajectory_id": "trajectories!"},
    left_out=("answers",), answers=bytes,
)  # fmt: skip
judge_requests = table_of("judge_requests", records.JudgeRequest, "group_id id", references={"group_id": "groups"})
rounds = table_of(
    "rounds",
    records.Round,
    "alias started_at",
    checks={
        "commit_is_complete": "state <> 'committed' OR (checkpoint IS NOT NULL AND to_version IS NOT NULL)",
    },
)
# At most one round of an alias is in progress.
index_where("uq_rounds_started", rounds.c.state == "started", rounds.c.alias, unique=True)
# What a round did with each sampled answer of its trajectories; for display.
answer_training = table_of(
    "answer_training",
    records.AnswerTraining,
    key="call_id choice",
    references={"call_id": "calls!", "round_id": "rounds"},
    # An answer carries loss with an advantage, or has a reason why not.
    checks={"advantage_or_reason": "(advantage IS NULL) <> (untrained IS NULL)"},
)
# Trajectories that a round used for SFT without consuming them: other rounds may still train them.
sft_trajectories = table_of(
    "sft_trajectories", None, "trajectory_id", key="round_id trajectory_id",
    references={"round_id": "rounds", "trajectory_id": "trajectories!"}, round_id=Id, trajectory_id=TrajectoryId,
)  # fmt: skip
# Observations are only added; the newest one of a kind and a subject counts.
observations = table_of("observations", operation.Observation, "alias kind id")
# The latest progress of each phase of an alias.
job_progress = table_of("job_progress", operation.JobProgress, key="alias phase")

# Tables of the tuner: tasks, runs and their rollouts.
tasks = table_of("tasks", operation.TaskRow)
tunings = table_of(
    "tunings",
    operation.Tuning,
    "kind started_at",
    checks={
        # Only a running tuning has no end.
        "end_is_known": "(state = 'running') = (ended_at IS NULL)",
        "failure_has_reason": "state <> 'failed' OR error IS NOT NULL",
    },
)
rollouts = table_of(
    "rollouts",
    operation.Rollout,
    "tuning_id candidate",
    "prompt_id",
    references={"tuning_id": "tunings", "prompt_id": "prompts"},
    checks={
        # Live trajectories may be trained, gathered ones on request; those of an evaluation never.
        "purpose_known": "purpose IN ('live', 'eval', 'gathered')",
        # Only a planned rollout has no end, and only a failed one a reason.
        "end_is_known": "(state = 'planned') = (ended_at IS NULL)",
        "failure_has_reason": "(state = 'failed') = (failure IS NOT NULL)",
        # A judge failure is never a number; scores and failures have a judge.
        "score_or_failure": "score IS NULL OR judge_failure IS NULL",
        "score_has_judge": "(judge IS NULL) = (score IS NULL AND judge_failure IS NULL)",
    },
)

# Tables of operation: proxies, leases, alarms, API keys, audit log and deletions.
proxy_instances = table_of("proxy_instances", operation.ProxyInstance)
# A lease has one owner until it expires; the owner renews it.
leases = table_of("leases", operation.LeaseHolder, key="name")
alarms = table_of("alarms", operation.Alarm, key="name")
# A key is stored by its SHA-256; two rows with one hash would be two limits for one key.
keys = table_of(
    "keys",
    operation.Key,
    unique="hash",
    checks={
        # A limit of 0 would be a revoked key.
        "positive_limits": "requests_per_minute > 0 AND tokens_per_minute > 0 AND max_parallel_requests > 0 "
        "AND max_tokens > 0 AND tokens_per_day > 0 AND tokens_per_month > 0",
    },
)
# What keys used, by UTC day (2026-11-23), key ("": none), agent or model, and purpose; without content.
usage = table_of(
    "usage", None, "key_id day", key="day key_id alias purpose", day=Annotated[str, 10], key_id=Text64, alias=Text128,
    purpose=Text16, calls=BigInt, failed=BigInt, prompt_tokens=BigInt, completion_tokens=BigInt,
)  # fmt: skip
# What operators read and changed. A change has its row before it happens; status is NULL until the outcome is known.
audit_entries = table_of("audit_entries", operation.AuditEntry, "last_at")
# Deletions, without the deleted content; proxies learn from them that messages may be gone.
deletions = table_of(
    "deletions", operation.Deletion, left_out=("messages", "groups_dropped", "unswept_messages", "feedback")
)
# Messages and tool lists that a deleted call named; the sweep deletes those that no other call names.
orphan_candidates = table_of("orphan_candidates", None, key="hash", hash=Hash)
