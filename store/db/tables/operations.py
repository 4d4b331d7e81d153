"""Tables of operation: proxies, leases, alarms, API keys, audit log and deletions."""

from __future__ import annotations

import sqlalchemy as sa

from ratchet.store.db.table_types import CALL_ID, HASH, ID, JSON, TIME, enum_constraint, metadata
from ratchet.store.states import KeyScope

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
