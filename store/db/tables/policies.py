"""Tables of policy versions: base models, prompts, versions and the decisions on them."""

from __future__ import annotations

import sqlalchemy as sa

from ratchet.store.db.table_types import ID, JSON, TIME, enum_constraint, metadata
from ratchet.store.states import SERVING, PolicyAction, PolicyState, PromptMode

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
    sa.Index(f"uq_policies_{_state}", policies.c.alias, unique=True, sqlite_where=policies.c.state == _state.value,
             postgresql_where=policies.c.state == _state.value)  # fmt: skip

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
