"""Every table. Rewritten until the first release, under another name; afterwards a change adds a migration."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001_shared_parents"
down_revision = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
# The C collation compares ids byte by byte on every server.
CALL_ID = sa.String(40).with_variant(sa.String(40, collation="C"), "postgresql")
TRAJECTORY_ID = sa.String(128).with_variant(sa.String(128, collation="C"), "postgresql")


def upgrade() -> None:
    # In the order of the foreign keys.
    _alarms()
    _audit_entries()
    _base_models()
    _deletions()
    _groups()
    _job_progress()
    _keys()
    _leases()
    _messages()
    _observations()
    _orphan_candidates()
    _prompts()
    _proxy_instances()
    _rounds()
    _tasks()
    _toolsets()
    _tunings()
    _usage()
    _judge_requests()
    _policies()
    _rollouts()
    _trajectories()
    _calls()
    _decisions()
    _releases()
    _feedback()
    _prompt_blocks()
    _resamples()
    _sft_trajectories()
    _teacher_scores()
    _trajectory_tags()
    _verdicts()
    _choices()
    _tool_calls()
    _answer_training()


def _alarms() -> None:
    op.create_table(
        "alarms",
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("raised_at", sa.Double, nullable=False),
        sa.Column("last_raised_at", sa.Double, nullable=False),
        sa.Column("count", sa.Integer, nullable=False),
        sa.Column("cleared_at", sa.Double),
        sa.Column("sent_at", sa.Double),
        sa.PrimaryKeyConstraint("name", name="pk_alarms"),
    )


def _audit_entries() -> None:
    op.create_table(
        "audit_entries",
        sa.Column("id", CALL_ID, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("last_at", sa.Double, nullable=False),
        sa.Column("count", sa.Integer, nullable=False),
        sa.Column("actor", sa.Text, nullable=False),
        sa.Column("method", sa.String(8), nullable=False),
        sa.Column("route", sa.Text, nullable=False),
        sa.Column("target", sa.JSON, nullable=False),
        sa.Column("key_id", sa.String(40)),
        sa.Column("client", sa.String(64)),
        sa.Column("status", sa.Integer),
        sa.PrimaryKeyConstraint("id", name="pk_audit_entries"),
    )
    op.create_index("ix_audit_entries_last_at", "audit_entries", ["last_at"])


def _base_models() -> None:
    op.create_table(
        "base_models",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("file_digests", sa.JSON, nullable=False),
        sa.Column("server_fingerprint", sa.JSON, nullable=False),
        sa.Column("registered_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_base_models"),
    )


def _deletions() -> None:
    op.create_table(
        "deletions",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("started_at", sa.Double, nullable=False),
        sa.Column("updated_at", sa.Double, nullable=False),
        sa.Column("trajectory_count", sa.Integer, nullable=False),
        sa.Column("call_count", sa.Integer, nullable=False),
        sa.Column("policies", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_deletions"),
    )


def _groups() -> None:
    op.create_table(
        "groups",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("alias", sa.String(128), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("formed_at", sa.Double, nullable=False),
        sa.Column("failures", sa.Integer, server_default="0", nullable=False),
        sa.Column("retry_at", sa.Double),
        sa.Column("drop_reason", sa.Text),
        sa.CheckConstraint("(state = 'dropped') = (drop_reason IS NOT NULL)", name="ck_groups_drop_has_reason"),
        sa.CheckConstraint("state IN ('ready', 'judged', 'trained', 'dropped')", name="ck_groups_state_known"),
        sa.PrimaryKeyConstraint("id", name="pk_groups"),
    )
    op.create_index("ix_groups_state_formed_at", "groups", ["state", "formed_at"])


def _job_progress() -> None:
    op.create_table(
        "job_progress",
        sa.Column("alias", sa.String(128), nullable=False),
        sa.Column("phase", sa.String(32), nullable=False),
        sa.Column("done", sa.Double, nullable=False),
        sa.Column("total", sa.Double, nullable=False),
        sa.Column("seconds", sa.Double, nullable=False),
        sa.Column("means", sa.JSON, nullable=False),
        sa.Column("ended", sa.Boolean, nullable=False),
        sa.Column("updated_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("alias", "phase", name="pk_job_progress"),
    )


def _keys() -> None:
    op.create_table(
        "keys",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
        sa.Column("scope", sa.String(16), nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("revoked_at", sa.Double),
        sa.Column("last_used_at", sa.Double),
        sa.Column("requests_per_minute", sa.Integer),
        sa.Column("tokens_per_minute", sa.Integer),
        sa.Column("agents", sa.JSON),
        sa.Column("max_parallel_requests", sa.Integer),
        sa.Column("expires_at", sa.Double),
        sa.Column("models", sa.JSON),
        sa.Column("max_tokens", sa.Integer),
        sa.Column("tokens_per_day", sa.BigInteger),
        sa.Column("tokens_per_month", sa.BigInteger),
        sa.CheckConstraint("scope IN ('agent', 'operator')", name="ck_keys_scope_known"),
        sa.CheckConstraint(
            "requests_per_minute > 0 AND tokens_per_minute > 0 AND max_parallel_requests > 0 "
            "AND max_tokens > 0 AND tokens_per_day > 0 AND tokens_per_month > 0",
            name="ck_keys_positive_limits",
        ),
        sa.PrimaryKeyConstraint("id", name="pk_keys"),
        sa.UniqueConstraint("hash", name="uq_keys_hash"),
    )


def _leases() -> None:
    op.create_table(
        "leases",
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("owner", sa.String(128), nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_leases"),
    )


def _messages() -> None:
    op.create_table(
        "messages",
        sa.Column("hash", sa.LargeBinary, nullable=False),
        sa.Column("parent", sa.LargeBinary, nullable=False),
        sa.Column("role", sa.String(32), nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("hash", name="pk_messages"),
    )
    op.create_index(
        "ix_messages_shared_parent", "messages", ["parent"],
        sqlite_where=sa.text("parent < x'0100000001'"), postgresql_where=sa.text("parent < '\\x0100000001'::bytea"),
    )  # fmt: skip


def _observations() -> None:
    op.create_table(
        "observations",
        sa.Column("id", ROW_ID, autoincrement=True, nullable=False),
        sa.Column("alias", sa.String(128), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("subject", sa.Text, nullable=False),
        sa.Column("content", sa.JSON, nullable=False),
        sa.Column("recorded_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_observations"),
    )
    op.create_index("ix_observations_alias_kind_id", "observations", ["alias", "kind", "id"])


def _orphan_candidates() -> None:
    op.create_table(
        "orphan_candidates",
        sa.Column("hash", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("hash", name="pk_orphan_candidates"),
    )


def _prompts() -> None:
    op.create_table(
        "prompts",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("mode", sa.String(16), nullable=False),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("families", sa.JSON, nullable=False),
        sa.Column("origin", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.CheckConstraint("mode IN ('replace', 'append')", name="ck_prompts_mode_known"),
        sa.PrimaryKeyConstraint("id", name="pk_prompts"),
    )
    op.create_index("ix_prompts_created_at_id", "prompts", ["created_at", "id"])


def _proxy_instances() -> None:
    op.create_table(
        "proxy_instances",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("live_versions", sa.JSON, nullable=False),
        sa.Column("pinned_trajectories", sa.JSON, nullable=False),
        sa.Column("shipped_until", sa.Double, nullable=False),
        sa.Column("heartbeat_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_proxy_instances"),
    )


def _rounds() -> None:
    op.create_table(
        "rounds",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("alias", sa.String(128), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("from_version", sa.Integer, nullable=False),
        sa.Column("to_version", sa.Integer),
        sa.Column("started_at", sa.Double, nullable=False),
        sa.Column("ended_at", sa.Double),
        sa.Column("checkpoint", sa.Text),
        sa.Column("metrics", sa.JSON, nullable=False),
        sa.Column("reason", sa.Text),
        sa.CheckConstraint(
            "state <> 'committed' OR (checkpoint IS NOT NULL AND to_version IS NOT NULL)",
            name="ck_rounds_commit_is_complete",
        ),
        sa.CheckConstraint("state IN ('started', 'committed', 'abandoned')", name="ck_rounds_state_known"),
        sa.PrimaryKeyConstraint("id", name="pk_rounds"),
    )
    op.create_index("ix_rounds_alias_started_at", "rounds", ["alias", "started_at"])
    op.create_index("uq_rounds_started", "rounds", ["alias"], unique=True, **_where("state = 'started'"))


def _tasks() -> None:
    op.create_table(
        "tasks",
        sa.Column("id", sa.String(256), nullable=False),
        sa.Column("task_set", sa.Text, nullable=False),
        sa.Column("split", sa.Text, nullable=False),
        sa.Column("content", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_tasks"),
    )


def _toolsets() -> None:
    op.create_table(
        "toolsets",
        sa.Column("hash", sa.LargeBinary, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("hash", name="pk_toolsets"),
    )


def _tunings() -> None:
    op.create_table(
        "tunings",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("alias", sa.String(128), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("config", sa.JSON, nullable=False),
        sa.Column("result", sa.JSON(none_as_null=True)),
        sa.Column("error", sa.Text),
        sa.Column("started_at", sa.Double, nullable=False),
        sa.Column("ended_at", sa.Double),
        sa.CheckConstraint("(state = 'running') = (ended_at IS NULL)", name="ck_tunings_end_is_known"),
        sa.CheckConstraint(
            "kind IN ('select-model', 'prompt', 'weights', 'eval', 'gather', 'train', 'lessons', 'doctor')",
            name="ck_tunings_kind_known",
        ),
        sa.CheckConstraint("state <> 'failed' OR error IS NOT NULL", name="ck_tunings_failure_has_reason"),
        sa.CheckConstraint("state IN ('running', 'done', 'failed', 'stopped')", name="ck_tunings_state_known"),
        sa.PrimaryKeyConstraint("id", name="pk_tunings"),
    )
    op.create_index("ix_tunings_kind_started_at", "tunings", ["kind", "started_at"])


def _judge_requests() -> None:
    op.create_table(
        "judge_requests",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("group_id", sa.String(40)),
        sa.Column("judge", sa.Text, nullable=False),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("request", sa.LargeBinary, nullable=False),
        sa.Column("response", sa.LargeBinary, nullable=False),
        sa.Column("status", sa.Integer, nullable=False),
        sa.Column("error", sa.Text),
        sa.Column("prompt_tokens", sa.Integer, nullable=False),
        sa.Column("completion_tokens", sa.Integer, nullable=False),
        sa.Column("cost", sa.Double),
        sa.Column("latency", sa.Double, nullable=False),
        sa.Column("requested_at", sa.Double, nullable=False),
        sa.ForeignKeyConstraint(["group_id"], ["groups.id"], name="fk_judge_requests_group_id"),
        sa.PrimaryKeyConstraint("id", name="pk_judge_requests"),
    )
    op.create_index("ix_judge_requests_group_id_id", "judge_requests", ["group_id", "id"])


def _policies() -> None:
    op.create_table(
        "policies",
        sa.Column("alias", sa.String(128), nullable=False),
        sa.Column("version", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("served_name", sa.Text, nullable=False),
        sa.Column("adapter", sa.Text),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("round_id", sa.String(40)),
        sa.Column("evidence", sa.JSON, nullable=False),
        sa.Column("share", sa.Double),
        sa.Column("pruned_at", sa.Double),
        sa.Column("pinned_at", sa.Double),
        sa.Column("recalled_at", sa.Double),
        sa.Column("prompt_id", sa.String(40)),
        sa.Column("base_model_id", sa.String(40)),
        sa.Column("replicas", sa.JSON, server_default="[]", nullable=False),
        sa.CheckConstraint(
            "state IN ('candidate', 'ramp', 'live', 'holdback', 'unproven', 'retired', 'rejected')",
            name="ck_policies_state_known",
        ),
        sa.CheckConstraint(
            "(share IS NOT NULL) = (state IN ('ramp', 'holdback'))", name="ck_policies_share_beside_live"
        ),
        sa.CheckConstraint("pinned_at IS NULL OR state = 'live'", name="ck_policies_pinned_is_live"),
        sa.CheckConstraint(
            "(version = 0) = (adapter IS NULL AND prompt_id IS NULL)", name="ck_policies_base_version_has_no_adapter"
        ),
        sa.ForeignKeyConstraint(["base_model_id"], ["base_models.id"], name="fk_policies_base_model_id"),
        sa.ForeignKeyConstraint(["prompt_id"], ["prompts.id"], name="fk_policies_prompt_id"),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.id"], name="fk_policies_round_id"),
        sa.PrimaryKeyConstraint("alias", "version", name="pk_policies"),
    )
    for state in ("holdback", "live", "ramp"):
        op.create_index(f"uq_policies_{state}", "policies", ["alias"], unique=True, **_where(f"state = '{state}'"))


def _rollouts() -> None:
    op.create_table(
        "rollouts",
        sa.Column("id", TRAJECTORY_ID, nullable=False),
        sa.Column("tuning_id", sa.String(40), nullable=False),
        sa.Column("task_id", sa.String(256), nullable=False),
        sa.Column("split", sa.Text, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("candidate", sa.String(256), nullable=False),
        sa.Column("model", sa.String(128)),
        sa.Column("purpose", sa.String(16), nullable=False),
        sa.Column("prompt_id", sa.String(40)),
        sa.Column("key_id", sa.String(64)),
        sa.Column("scenario", sa.JSON, nullable=False),
        sa.Column("step", sa.Integer, nullable=False),
        sa.Column("planned_at", sa.Double, nullable=False),
        sa.Column("started_at", sa.Double),
        sa.Column("ended_at", sa.Double),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("failure", sa.Text),
        sa.Column("response", sa.Text),
        sa.Column("reward", sa.Double),
        sa.Column("metrics", sa.JSON, nullable=False),
        sa.Column("prompt_tokens", sa.Integer, nullable=False),
        sa.Column("completion_tokens", sa.Integer, nullable=False),
        sa.Column("score", sa.Double),
        sa.Column("judge", sa.Text),
        sa.Column("judge_failure", sa.Text),
        sa.CheckConstraint("(state = 'failed') = (failure IS NOT NULL)", name="ck_rollouts_failure_has_reason"),
        sa.CheckConstraint("(state = 'planned') = (ended_at IS NULL)", name="ck_rollouts_end_is_known"),
        sa.CheckConstraint("purpose IN ('live', 'eval', 'gathered')", name="ck_rollouts_purpose_known"),
        sa.CheckConstraint("state IN ('planned', 'ended', 'failed', 'abandoned')", name="ck_rollouts_state_known"),
        sa.CheckConstraint(
            "(judge IS NULL) = (score IS NULL AND judge_failure IS NULL)", name="ck_rollouts_score_has_judge"
        ),
        sa.CheckConstraint("score IS NULL OR judge_failure IS NULL", name="ck_rollouts_score_or_failure"),
        sa.ForeignKeyConstraint(["prompt_id"], ["prompts.id"], name="fk_rollouts_prompt_id"),
        sa.ForeignKeyConstraint(["tuning_id"], ["tunings.id"], name="fk_rollouts_tuning_id"),
        sa.PrimaryKeyConstraint("id", name="pk_rollouts"),
    )
    op.create_index("ix_rollouts_prompt_id", "rollouts", ["prompt_id"])
    op.create_index("ix_rollouts_tuning_id_candidate", "rollouts", ["tuning_id", "candidate"])


def _trajectories() -> None:
    op.create_table(
        "trajectories",
        sa.Column("id", TRAJECTORY_ID, nullable=False),
        sa.Column("alias", sa.String(128), nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("purpose", sa.String(16), nullable=False),
        sa.Column("task", sa.Text),
        sa.Column("root_node", sa.LargeBinary, nullable=False),
        sa.Column("tools_hash", sa.LargeBinary, nullable=False),
        sa.Column("key_id", sa.String(64)),
        sa.Column("opened_at", sa.Double, nullable=False),
        sa.Column("last_active_at", sa.Double, nullable=False),
        sa.Column("sealed_at", sa.Double),
        sa.Column("sealed_by", sa.String(16)),
        sa.Column("group_id", sa.String(40)),
        sa.Column("round_id", sa.String(40)),
        sa.Column("drop_reason", sa.Text),
        sa.Column("successors", sa.Integer, server_default="0", nullable=False),
        sa.Column("draw", sa.JSON(none_as_null=True)),
        sa.Column("counted", sa.Boolean, server_default=sa.false(), nullable=False),
        sa.CheckConstraint("(state = 'dropped') = (drop_reason IS NOT NULL)", name="ck_trajectories_drop_has_reason"),
        sa.CheckConstraint("(state = 'trained') = (round_id IS NOT NULL)", name="ck_trajectories_trained_once"),
        sa.CheckConstraint(
            "state IN ('open', 'sealed', 'grouped', 'trained', 'dropped')", name="ck_trajectories_state_known"
        ),
        sa.ForeignKeyConstraint(["group_id"], ["groups.id"], name="fk_trajectories_group_id"),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.id"], name="fk_trajectories_round_id"),
        sa.PrimaryKeyConstraint("id", name="pk_trajectories"),
    )
    op.create_index("ix_trajectories_alias_opened_at", "trajectories", ["alias", "opened_at"])
    op.create_index("ix_trajectories_alias_state_opened_at", "trajectories", ["alias", "state", "opened_at"])
    op.create_index("ix_trajectories_alias_version_opened_at", "trajectories", ["alias", "version", "opened_at"])
    op.create_index("ix_trajectories_drop_reason", "trajectories", ["drop_reason"], **_where("drop_reason IS NOT NULL"))
    op.create_index("ix_trajectories_group_id", "trajectories", ["group_id"], **_where("group_id IS NOT NULL"))
    op.create_index("ix_trajectories_key_id_opened_at", "trajectories", ["key_id", "opened_at"])
    op.create_index("ix_trajectories_opened_at_id", "trajectories", ["opened_at", "id"])
    op.create_index("ix_trajectories_round_id", "trajectories", ["round_id"], **_where("round_id IS NOT NULL"))
    op.create_index("ix_trajectories_state_last_active_at", "trajectories", ["state", "last_active_at"])
    op.create_index("ix_trajectories_state_opened_at", "trajectories", ["state", "opened_at"])
    op.create_index(
        "ix_trajectories_task_opened_at", "trajectories", ["task", "opened_at"], **_where("task IS NOT NULL")
    )


def _calls() -> None:
    op.create_table(
        "calls",
        sa.Column("id", CALL_ID, nullable=False),
        sa.Column("trajectory_id", TRAJECTORY_ID, nullable=False),
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
        sa.Column("tags", sa.JSON, nullable=False),
        sa.Column("sampling", sa.JSON, nullable=False),
        sa.Column("prompt_node", sa.LargeBinary, nullable=False),
        sa.Column("tools_hash", sa.LargeBinary, nullable=False),
        sa.Column("context", sa.String(8), nullable=False),
        sa.Column("prompt_blocks", sa.LargeBinary),
        sa.Column("prompt_ids", sa.LargeBinary, nullable=False),
        sa.Column("prompt_tokens", sa.Integer, nullable=False),
        sa.Column("completion_tokens", sa.Integer, nullable=False),
        sa.Column("started_at", sa.Double, nullable=False),
        sa.Column("first_byte_at", sa.Double),
        sa.Column("ended_at", sa.Double),
        sa.Column("status", sa.Integer),
        sa.Column("upstream", sa.Text),
        sa.Column("untrainable", sa.Text),
        sa.Column("error", sa.Text),
        sa.Column("response_id", sa.String(128)),
        sa.Column("retained_node", sa.LargeBinary),
        sa.CheckConstraint("context IN ('root', 'exact', 'fork')", name="ck_calls_context_known"),
        sa.CheckConstraint(
            "state IN ('started', 'answered', 'failed', 'aborted', 'interrupted')", name="ck_calls_state_known"
        ),
        sa.ForeignKeyConstraint(["trajectory_id"], ["trajectories.id"], name="fk_calls_trajectory_id"),
        sa.PrimaryKeyConstraint("id", name="pk_calls"),
    )
    op.create_index("ix_calls_response_id", "calls", ["response_id"], **_where("response_id IS NOT NULL"))
    op.create_index("ix_calls_retained_node", "calls", ["retained_node"], **_where("retained_node IS NOT NULL"))
    op.create_index("ix_calls_trajectory_id_started_at", "calls", ["trajectory_id", "started_at"])
    op.create_index("ix_calls_unanswered", "calls", ["state", "id"], **_where("state != 'answered'"))


def _decisions() -> None:
    op.create_table(
        "decisions",
        sa.Column("id", ROW_ID, autoincrement=True, nullable=False),
        sa.Column("alias", sa.String(128), nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("action", sa.String(16), nullable=False),
        sa.Column("decided_by", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("evidence", sa.JSON, nullable=False),
        sa.Column("decided_at", sa.Double, nullable=False),
        sa.CheckConstraint(
            "action IN ('ramp', 'share', 'hold', 'promote', 'anchor', 'skip', 'pin', 'unpin', 'unproven', 'reject', "
            "'rollback')",
            name="ck_decisions_action_known",
        ),
        sa.ForeignKeyConstraint(
            ["alias", "version"], ["policies.alias", "policies.version"], name="fk_decisions_alias"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_decisions"),
    )
    op.create_index("ix_decisions_alias_version_id", "decisions", ["alias", "version", "id"])


def _releases() -> None:
    op.create_table(
        "releases",
        sa.Column("alias", sa.String(128), nullable=False),
        sa.Column("version", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("evidence", sa.JSON, nullable=False),
        sa.Column("updated_at", sa.Double, nullable=False),
        sa.ForeignKeyConstraint(["alias", "version"], ["policies.alias", "policies.version"], name="fk_releases_alias"),
        sa.PrimaryKeyConstraint("alias", "version", name="pk_releases"),
    )


def _feedback() -> None:
    op.create_table(
        "feedback",
        sa.Column("id", CALL_ID, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("target", sa.String(256), nullable=False),
        sa.Column("source", sa.String(256), nullable=False),
        sa.Column("given_at", sa.Double, nullable=False),
        sa.Column("key_id", sa.String(64)),
        sa.Column("trusted", sa.Boolean, nullable=False),
        sa.Column("value", sa.Double),
        sa.Column("comment", sa.Text, nullable=False),
        sa.Column("demonstration", sa.Text),
        sa.Column("trajectory_id", TRAJECTORY_ID),
        sa.Column("call_id", CALL_ID),
        sa.Column("applied_at", sa.Double),
        sa.ForeignKeyConstraint(
            ["trajectory_id"], ["trajectories.id"], name="fk_feedback_trajectory_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_feedback"),
    )
    op.create_index("ix_feedback_given_at_id", "feedback", ["given_at", "id"])
    op.create_index("ix_feedback_trajectory_id_given_at", "feedback", ["trajectory_id", "given_at"])
    op.create_index(
        "ix_feedback_unapplied", "feedback", ["trajectory_id"], **_where("applied_at IS NULL AND value IS NOT NULL")
    )
    op.create_index("ix_feedback_unmatched", "feedback", ["target"], **_where("trajectory_id IS NULL"))


def _prompt_blocks() -> None:
    op.create_table(
        "prompt_blocks",
        sa.Column("trajectory_id", TRAJECTORY_ID, nullable=False),
        sa.Column("digest", sa.LargeBinary, nullable=False),
        sa.Column("token_ids", sa.LargeBinary, nullable=False),
        sa.ForeignKeyConstraint(
            ["trajectory_id"], ["trajectories.id"], name="fk_prompt_blocks_trajectory_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("trajectory_id", "digest", name="pk_prompt_blocks"),
    )


def _resamples() -> None:
    op.create_table(
        "resamples",
        sa.Column("id", TRAJECTORY_ID, nullable=False),
        sa.Column("original_id", TRAJECTORY_ID, nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("alias", sa.String(128), nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("tokens", sa.Integer, nullable=False),
        sa.Column("planned_at", sa.Double, nullable=False),
        sa.Column("requested_at", sa.Double),
        sa.Column("ended_at", sa.Double),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("failure", sa.Text),
        sa.CheckConstraint("(state = 'failed') = (failure IS NOT NULL)", name="ck_resamples_failure_has_reason"),
        sa.CheckConstraint(
            "(state IN ('answered', 'failed')) = (ended_at IS NOT NULL)", name="ck_resamples_end_is_known"
        ),
        sa.CheckConstraint("state IN ('planned', 'requested', 'answered', 'failed')", name="ck_resamples_state_known"),
        sa.ForeignKeyConstraint(
            ["original_id"], ["trajectories.id"], name="fk_resamples_original_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_resamples"),
        sa.UniqueConstraint("original_id", "number", name="uq_resamples_original_id_number"),
    )
    op.create_index("ix_resamples_alias_requested_at", "resamples", ["alias", "requested_at"])


def _sft_trajectories() -> None:
    op.create_table(
        "sft_trajectories",
        sa.Column("round_id", sa.String(40), nullable=False),
        sa.Column("trajectory_id", TRAJECTORY_ID, nullable=False),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.id"], name="fk_sft_trajectories_round_id"),
        sa.ForeignKeyConstraint(
            ["trajectory_id"], ["trajectories.id"], name="fk_sft_trajectories_trajectory_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("round_id", "trajectory_id", name="pk_sft_trajectories"),
    )
    op.create_index("ix_sft_trajectories_trajectory_id", "sft_trajectories", ["trajectory_id"])


def _teacher_scores() -> None:
    op.create_table(
        "teacher_scores",
        sa.Column("trajectory_id", TRAJECTORY_ID, nullable=False),
        sa.Column("teacher", sa.Text, nullable=False),
        sa.Column("answers", sa.LargeBinary, nullable=False),
        sa.ForeignKeyConstraint(
            ["trajectory_id"], ["trajectories.id"], name="fk_teacher_scores_trajectory_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("trajectory_id", name="pk_teacher_scores"),
    )


def _trajectory_tags() -> None:
    op.create_table(
        "trajectory_tags",
        sa.Column("tag", sa.String(128), nullable=False),
        sa.Column("opened_at", sa.Double, nullable=False),
        sa.Column("trajectory_id", TRAJECTORY_ID, nullable=False),
        sa.ForeignKeyConstraint(
            ["trajectory_id"], ["trajectories.id"], name="fk_trajectory_tags_trajectory_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("tag", "opened_at", "trajectory_id", name="pk_trajectory_tags"),
    )
    op.create_index("ix_trajectory_tags_trajectory_id", "trajectory_tags", ["trajectory_id"])


def _usage() -> None:
    op.create_table(
        "usage",
        sa.Column("day", sa.String(10), nullable=False),
        sa.Column("key_id", sa.String(64), nullable=False),
        sa.Column("alias", sa.String(128), nullable=False),
        sa.Column("purpose", sa.String(16), nullable=False),
        sa.Column("calls", sa.BigInteger, nullable=False),
        sa.Column("failed", sa.BigInteger, nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("completion_tokens", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("day", "key_id", "alias", "purpose", name="pk_usage"),
    )
    op.create_index("ix_usage_key_id_day", "usage", ["key_id", "day"])


def _verdicts() -> None:
    op.create_table(
        "verdicts",
        sa.Column("id", ROW_ID, autoincrement=True, nullable=False),
        sa.Column("trajectory_id", TRAJECTORY_ID, nullable=False),
        sa.Column("group_id", sa.String(40)),
        sa.Column("judge", sa.Text, nullable=False),
        sa.Column("judge_version", sa.String(64), nullable=False),
        sa.Column("score", sa.Double),
        sa.Column("failure", sa.Text),
        sa.Column("explanation", sa.Text, nullable=False),
        sa.Column("components", sa.JSON, nullable=False),
        sa.Column("cost", sa.Double),
        sa.Column("latency", sa.Double, nullable=False),
        sa.Column("judged_at", sa.Double, nullable=False),
        sa.Column("judge_request_id", sa.String(40)),
        sa.Column("baseline_mean", sa.Double),
        sa.Column("baseline_std", sa.Double),
        sa.CheckConstraint("(score IS NULL) <> (failure IS NULL)", name="ck_verdicts_score_or_failure"),
        sa.ForeignKeyConstraint(["group_id"], ["groups.id"], name="fk_verdicts_group_id"),
        sa.ForeignKeyConstraint(["trajectory_id"], ["trajectories.id"], name="fk_verdicts_trajectory_id"),
        sa.PrimaryKeyConstraint("id", name="pk_verdicts"),
    )
    op.create_index("ix_verdicts_group_id", "verdicts", ["group_id"])
    op.create_index("ix_verdicts_trajectory_id_id", "verdicts", ["trajectory_id", "id"])


def _choices() -> None:
    op.create_table(
        "choices",
        sa.Column("call_id", CALL_ID, nullable=False),
        sa.Column("choice", sa.Integer, nullable=False),
        sa.Column("finish_reason", sa.String(32)),
        sa.Column("reply_node", sa.LargeBinary, nullable=False),
        sa.Column("link_key", sa.LargeBinary, nullable=False),
        sa.Column("skip_last_key", sa.LargeBinary),
        sa.Column("tool_call_ids", sa.JSON, nullable=False),
        sa.Column("token_ids", sa.LargeBinary, nullable=False),
        sa.Column("logprobs", sa.LargeBinary, nullable=False),
        sa.ForeignKeyConstraint(["call_id"], ["calls.id"], name="fk_choices_call_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("call_id", "choice", name="pk_choices"),
    )
    op.create_index("ix_choices_reply_node", "choices", ["reply_node"])


def _tool_calls() -> None:
    op.create_table(
        "tool_calls",
        sa.Column("call_id", CALL_ID, nullable=False),
        sa.Column("choice", sa.Integer, nullable=False),
        sa.Column("place", sa.Integer, nullable=False),
        sa.Column("alias", sa.String(128), nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("tool", sa.Text, nullable=False),
        sa.Column("tool_call_id", sa.Text, nullable=False),
        sa.Column("outcome", sa.String(24), nullable=False),
        sa.Column("result", sa.String(16)),
        sa.Column("detail", sa.Text),
        sa.CheckConstraint(
            "outcome IN ('valid', 'unknown_tool', 'invalid_json', 'schema_violation', 'unexpected_argument', "
            "'unchecked')",
            name="ck_tool_calls_outcome_known",
        ),
        sa.CheckConstraint("result IN ('ok', 'error', 'timeout', 'empty')", name="ck_tool_calls_result_known"),
        sa.ForeignKeyConstraint(["call_id"], ["calls.id"], name="fk_tool_calls_call_id", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("call_id", "choice", "place", name="pk_tool_calls"),
    )
    op.create_index("ix_tool_calls_alias_version_tool", "tool_calls", ["alias", "version", "tool"])


def _where(condition: str) -> dict[str, Any]:
    """Return the arguments that index only the rows that meet the condition."""
    return {"sqlite_where": sa.text(condition), "postgresql_where": sa.text(condition)}


def _answer_training() -> None:
    op.create_table(
        "answer_training",
        sa.Column("call_id", CALL_ID, nullable=False),
        sa.Column("choice", sa.Integer, nullable=False),
        sa.Column("round_id", sa.String(40), nullable=False),
        sa.Column("advantage", sa.Double),
        sa.Column("untrained", sa.Text),
        sa.Column("mismatch", sa.LargeBinary, nullable=False),
        sa.Column("advantages", sa.LargeBinary, nullable=False),
        sa.CheckConstraint("(advantage IS NULL) <> (untrained IS NULL)", name="ck_answer_training_advantage_or_reason"),
        sa.ForeignKeyConstraint(["call_id"], ["calls.id"], name="fk_answer_training_call_id", ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.id"], name="fk_answer_training_round_id"),
        sa.PrimaryKeyConstraint("call_id", "choice", name="pk_answer_training"),
    )
