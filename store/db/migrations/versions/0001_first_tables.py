"""First tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "alarms",
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("raised_at", sa.Double(), nullable=False),
        sa.Column("last_at", sa.Double(), nullable=False),
        sa.Column("count", sa.Integer(), nullable=False),
        sa.Column("cleared_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_alarms")),
    )
    op.create_table(
        "doors",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("live", sa.JSON(), nullable=False),
        sa.Column("pins", sa.JSON(), nullable=False),
        sa.Column("shipped_until", sa.Double(), nullable=False),
        sa.Column("heartbeat_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_doors")),
    )
    op.create_table(
        "groups",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("alias", sa.String(length=128), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("formed_at", sa.Double(), nullable=False),
        sa.Column("failures", sa.Integer(), server_default="0", nullable=False),
        sa.Column("retry_at", sa.Double(), nullable=True),
        sa.Column("drop_reason", sa.Text(), nullable=True),
        sa.CheckConstraint("(state = 'dropped') = (drop_reason IS NOT NULL)", name=op.f("ck_groups_drop_has_reason")),
        sa.CheckConstraint("state IN ('ready', 'judged', 'trained', 'dropped')", name=op.f("ck_groups_state_known")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_groups")),
    )
    op.create_index(op.f("ix_groups_state_formed_at"), "groups", ["state", "formed_at"], unique=False)
    op.create_table(
        "leases",
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("owner", sa.String(length=128), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_leases")),
    )
    op.create_table(
        "messages",
        sa.Column("hash", sa.String(length=48), nullable=False),
        sa.Column("parent", sa.String(length=48), nullable=False),
        sa.Column("role", sa.String(length=32), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("hash", name=op.f("pk_messages")),
    )
    op.create_table(
        "rounds",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("alias", sa.String(length=128), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("from_version", sa.Integer(), nullable=False),
        sa.Column("to_version", sa.Integer(), nullable=True),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("checkpoint", sa.Text(), nullable=True),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.CheckConstraint(
            "state <> 'committed' OR (checkpoint IS NOT NULL AND to_version IS NOT NULL)",
            name=op.f("ck_rounds_commit_is_whole"),
        ),
        sa.CheckConstraint("state IN ('started', 'committed', 'abandoned')", name=op.f("ck_rounds_state_known")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rounds")),
    )
    op.create_index(op.f("ix_rounds_alias_started_at"), "rounds", ["alias", "started_at"], unique=False)
    op.create_index(
        "uq_rounds_started",
        "rounds",
        ["alias"],
        unique=True,
        sqlite_where=sa.text("state = 'started'"),
        postgresql_where=sa.text("state = 'started'"),
    )
    op.create_table(
        "toolsets",
        sa.Column("hash", sa.String(length=48), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("hash", name=op.f("pk_toolsets")),
    )
    op.create_table(
        "policies",
        sa.Column("alias", sa.String(length=128), nullable=False),
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("served_name", sa.Text(), nullable=False),
        sa.Column("adapter", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("round_id", sa.String(length=40), nullable=True),
        sa.Column("evidence", sa.JSON(), nullable=False),
        sa.CheckConstraint(
            "state IN ('candidate', 'canary', 'live', 'retired', 'rejected')",
            name=op.f("ck_policies_state_known"),
        ),
        sa.CheckConstraint("(version = 0) = (adapter IS NULL)", name=op.f("ck_policies_base_has_no_adapter")),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.id"], name=op.f("fk_policies_round_id")),
        sa.PrimaryKeyConstraint("alias", "version", name=op.f("pk_policies")),
    )
    op.create_index(
        "uq_policies_live",
        "policies",
        ["alias"],
        unique=True,
        sqlite_where=sa.text("state = 'live'"),
        postgresql_where=sa.text("state = 'live'"),
    )
    op.create_table(
        "trajectories",
        sa.Column("id", sa.String(length=128), nullable=False),
        sa.Column("alias", sa.String(length=128), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("purpose", sa.String(length=16), nullable=False),
        sa.Column("task", sa.Text(), nullable=True),
        sa.Column("root_node", sa.String(length=48), nullable=False),
        sa.Column("tools_hash", sa.String(length=48), nullable=False),
        sa.Column("key_id", sa.String(length=64), nullable=True),
        sa.Column("opened_at", sa.Double(), nullable=False),
        sa.Column("last_active_at", sa.Double(), nullable=False),
        sa.Column("sealed_at", sa.Double(), nullable=True),
        sa.Column("sealed_by", sa.String(length=16), nullable=True),
        sa.Column("group_id", sa.String(length=40), nullable=True),
        sa.Column("round_id", sa.String(length=40), nullable=True),
        sa.Column("drop_reason", sa.Text(), nullable=True),
        sa.Column("successors", sa.Integer(), server_default="0", nullable=False),
        sa.CheckConstraint(
            "(state = 'dropped') = (drop_reason IS NOT NULL)", name=op.f("ck_trajectories_drop_has_reason")
        ),
        sa.CheckConstraint("(state = 'trained') = (round_id IS NOT NULL)", name=op.f("ck_trajectories_trained_once")),
        sa.CheckConstraint(
            "state IN ('open', 'sealed', 'grouped', 'trained', 'dropped')",
            name=op.f("ck_trajectories_state_known"),
        ),
        sa.ForeignKeyConstraint(["group_id"], ["groups.id"], name=op.f("fk_trajectories_group_id")),
        sa.ForeignKeyConstraint(["round_id"], ["rounds.id"], name=op.f("fk_trajectories_round_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_trajectories")),
    )
    op.create_index(op.f("ix_trajectories_group_id"), "trajectories", ["group_id"], unique=False)
    op.create_index(op.f("ix_trajectories_opened_at_id"), "trajectories", ["opened_at", "id"], unique=False)
    op.create_index(
        op.f("ix_trajectories_state_last_active_at"),
        "trajectories",
        ["state", "last_active_at"],
        unique=False,
    )
    op.create_table(
        "calls",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("trajectory_id", sa.String(length=128), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("alias", sa.String(length=128), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("dialect", sa.String(length=16), nullable=False),
        sa.Column("streamed", sa.Boolean(), nullable=False),
        sa.Column("linked_by", sa.String(length=32), nullable=False),
        sa.Column("parent_call", sa.String(length=40), nullable=True),
        sa.Column("parent_choice", sa.Integer(), nullable=False),
        sa.Column("key_id", sa.String(length=64), nullable=True),
        sa.Column("role", sa.String(length=128), nullable=True),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("sampling", sa.JSON(), nullable=False),
        sa.Column("prompt_node", sa.String(length=48), nullable=False),
        sa.Column("tools_hash", sa.String(length=48), nullable=False),
        sa.Column("context", sa.String(length=8), nullable=False),
        sa.Column("prompt_ids", sa.LargeBinary(), nullable=False),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("completion_tokens", sa.Integer(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("first_byte_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("status", sa.Integer(), nullable=True),
        sa.Column("upstream", sa.Text(), nullable=True),
        sa.Column("untrainable", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.CheckConstraint("context IN ('root', 'exact', 'fork')", name=op.f("ck_calls_context_known")),
        sa.CheckConstraint(
            "state IN ('begun', 'answered', 'failed', 'aborted', 'interrupted')",
            name=op.f("ck_calls_state_known"),
        ),
        sa.ForeignKeyConstraint(["trajectory_id"], ["trajectories.id"], name=op.f("fk_calls_trajectory_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_calls")),
    )
    op.create_index(op.f("ix_calls_started_at_id"), "calls", ["started_at", "id"], unique=False)
    op.create_index(op.f("ix_calls_trajectory_id_started_at"), "calls", ["trajectory_id", "started_at"], unique=False)
    op.create_table(
        "verdicts",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("trajectory_id", sa.String(length=128), nullable=False),
        sa.Column("group_id", sa.String(length=40), nullable=True),
        sa.Column("judge", sa.Text(), nullable=False),
        sa.Column("judge_version", sa.String(length=64), nullable=False),
        sa.Column("score", sa.Double(), nullable=True),
        sa.Column("failure", sa.Text(), nullable=True),
        sa.Column("explanation", sa.Text(), nullable=False),
        sa.Column("components", sa.JSON(), nullable=False),
        sa.Column("cost", sa.Double(), nullable=True),
        sa.Column("latency", sa.Double(), nullable=False),
        sa.Column("judged_at", sa.Double(), nullable=False),
        sa.CheckConstraint("(score IS NULL) <> (failure IS NULL)", name=op.f("ck_verdicts_score_or_failure")),
        sa.ForeignKeyConstraint(["group_id"], ["groups.id"], name=op.f("fk_verdicts_group_id")),
        sa.ForeignKeyConstraint(["trajectory_id"], ["trajectories.id"], name=op.f("fk_verdicts_trajectory_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_verdicts")),
    )
    op.create_index(op.f("ix_verdicts_group_id"), "verdicts", ["group_id"], unique=False)
    op.create_index(op.f("ix_verdicts_trajectory_id_id"), "verdicts", ["trajectory_id", "id"], unique=False)
    op.create_table(
        "choices",
        sa.Column("call_id", sa.String(length=40), nullable=False),
        sa.Column("choice", sa.Integer(), nullable=False),
        sa.Column("finish_reason", sa.String(length=32), nullable=True),
        sa.Column("reply_node", sa.String(length=48), nullable=False),
        sa.Column("link_key", sa.String(length=48), nullable=False),
        sa.Column("tool_call_ids", sa.JSON(), nullable=False),
        sa.Column("ids", sa.LargeBinary(), nullable=False),
        sa.Column("logprobs", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["call_id"], ["calls.id"], name=op.f("fk_choices_call_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("call_id", "choice", name=op.f("pk_choices")),
    )


def downgrade() -> None:
    op.drop_table("choices")
    op.drop_table("verdicts")
    op.drop_table("calls")
    op.drop_table("trajectories")
    op.drop_table("policies")
    op.drop_table("toolsets")
    op.drop_table("rounds")
    op.drop_table("messages")
    op.drop_table("leases")
    op.drop_table("groups")
    op.drop_table("doors")
    op.drop_table("alarms")
