"""What the proxy counts, for Prometheus. Every name is documented in docs/metrics.md; labels are few and bounded."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import Receive, Scope, Send

from proxy.asgi import send_bytes

_CALL_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_QUICK_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1)
_REASONS = ("no token ids", "no logprobs", "no prompt token ids", "no answer", "echo", "image", "beam search")


class Metrics:
    """The proxy's metrics in a registry of their own, so that several proxies can live in one process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.calls = Counter("ratchet_calls", "Captured calls by their end", ["alias", "state"], registry=registry)
        self.under_way = Gauge("ratchet_calls_under_way", "Captured calls that have not ended", registry=registry)
        self.call_seconds = Histogram(
            "ratchet_call_duration_seconds", "From request to last byte", buckets=_CALL_BUCKETS, registry=registry
        )
        self.first_byte_seconds = Histogram(
            "ratchet_first_byte_seconds", "From request to the first byte of the answer", buckets=_CALL_BUCKETS,
            registry=registry,
        )  # fmt: skip
        self.overhead_seconds = Histogram(
            "ratchet_overhead_seconds", "Time per call that is the proxy's, not the upstream's",
            buckets=_QUICK_BUCKETS, registry=registry,
        )  # fmt: skip
        self.tokens = Counter("ratchet_tokens", "Tokens of captured calls", ["kind"], registry=registry)
        self.context_tokens = Counter(
            "ratchet_context_tokens", "Completion tokens by how their context is known", ["context"], registry=registry
        )
        self.untrainable = Counter(
            "ratchet_untrainable_calls", "Calls whose tokens may not be trained", ["reason"], registry=registry
        )
        self.links = Counter(
            "ratchet_links", "Calls by how their trajectory was found", ["linked_by"], registry=registry
        )
        self.trajectories = Gauge("ratchet_trajectories_open", "Trajectories remembered for linking", registry=registry)
        self.live_version = Gauge("ratchet_policy_version", "Version of new trajectories", ["alias"], registry=registry)
        self.upstream_errors = Counter(
            "ratchet_upstream_errors", "Upstream failures that the proxy saw", ["kind"], registry=registry
        )
        self.adapter_loads = Counter(
            "ratchet_adapter_loads",
            "Adapters loaded because a replica did not know them",
            ["outcome"],
            registry=registry,
        )
        self.store_up = Gauge("ratchet_store_up", "1 when the store answered last time, else 0", registry=registry)
        self.journal_bytes = Gauge("ratchet_journal_bytes", "Bytes in the journal's folder", registry=registry)
        self.unshipped = Gauge(
            "ratchet_journal_unshipped_records", "Records that are not in the store yet", registry=registry
        )
        self.commit_seconds = Histogram(
            "ratchet_journal_commit_seconds", "Time of one group commit", buckets=_QUICK_BUCKETS, registry=registry
        )
        self.journal_errors = Counter("ratchet_journal_errors", "Failed writes to the journal", registry=registry)
        self.lost = Counter(
            "ratchet_journal_lost_records",
            "Records given up: no room, or a segment deleted or damaged",
            registry=registry,
        )
        self.shipped = Counter("ratchet_shipped_records", "Records written to the store", registry=registry)
        self.ship_failures = Counter("ratchet_ship_failures", "Batches that the store did not take", registry=registry)
        self.dead_letters = Counter(
            "ratchet_dead_letters", "Records that the store refuses, put aside", registry=registry
        )

    def mark_untrainable(self, reason: str) -> None:
        """Count an untrainable call under a bounded set of reasons."""
        self.untrainable.labels(reason if reason in _REASONS else "other").inc()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /metrics."""
        await send_bytes(
            send, 200, generate_latest(self.registry), [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]
        )
