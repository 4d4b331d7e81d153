"""What the proxy counts, for Prometheus. Every name is documented in docs/metrics.md; labels are few and bounded.

What is counted of each call's end is in `call_counts.py`. Values that something else knows already (the backlog, the
versions) are read when Prometheus asks.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector
from starlette.types import Receive, Scope, Send

from ratchet.proxy.errors import ProxyError
from ratchet.proxy.telemetry import logs
from ratchet.proxy.telemetry.store_health import StoreStatus
from ratchet.proxy.wire.asgi import send_bytes

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second sample for each counter, of when it was made

_CALL_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
_QUICK_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1)
_WORD_BORDER = re.compile(r"(?<=[a-z])(?=[A-Z])")


class Metrics:
    """The proxy's metrics in a registry of their own, so that several proxies can live in one process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.calls = Counter(
            "ratchet_calls", "Captured calls by their end", ["alias", "dialect", "state", "purpose"], registry=registry
        )
        self.errors = Counter("ratchet_errors", "Failed requests by class of error", ["class"], registry=registry)
        self.under_way = 0  # captured calls; a plain number, since every call changes it twice
        Gauge("ratchet_calls_in_flight", "Captured calls that have not ended", registry=registry).set_function(
            lambda: self.under_way
        )
        self.call_seconds = Histogram(
            "ratchet_call_duration_seconds", "From request to last byte", ["alias"], buckets=_CALL_BUCKETS,
            registry=registry,
        )  # fmt: skip
        self.first_token_seconds = Histogram(
            "ratchet_time_to_first_token_seconds", "From request to the first token of a streamed answer", ["alias"],
            buckets=_CALL_BUCKETS, registry=registry,
        )  # fmt: skip
        self.inter_token_seconds = Histogram(
            "ratchet_inter_token_latency_seconds", "Mean time between the tokens of a streamed call", ["alias"],
            buckets=_TOKEN_BUCKETS, registry=registry,
        )  # fmt: skip
        self.overhead_seconds = Histogram(
            "ratchet_overhead_seconds", "Time per call that is the proxy's, not the upstream's",
            buckets=_QUICK_BUCKETS, registry=registry,
        )  # fmt: skip
        self.tokens = Counter(
            "ratchet_tokens", "Tokens of captured calls", ["alias", "kind", "purpose"], registry=registry
        )
        self.context_tokens = Counter(
            "ratchet_context_tokens", "Completion tokens by how their context is known", ["context"], registry=registry
        )
        self.untrainable = Counter(
            "ratchet_untrainable_calls", "Calls whose tokens may not be trained", ["reason"], registry=registry
        )
        self.feedback = Counter("ratchet_feedback", "Feedback that was taken", ["state"], registry=registry)
        self.links = Counter(
            "ratchet_links", "Calls by how their trajectory was found", ["linked_by"], registry=registry
        )
        self.trajectories = Gauge("ratchet_trajectories_open", "Trajectories remembered for linking", registry=registry)
        self._held = Gauge("ratchet_memory_bytes", "Bytes that are held, estimated", ["what"], registry=registry)
        self.live_version = Gauge("ratchet_policy_version", "Version of new trajectories", ["alias"], registry=registry)
        self.upstream_errors = Counter(
            "ratchet_upstream_errors", "Upstream failures that the proxy saw", ["kind"], registry=registry
        )
        self.upstream_retries = Counter(
            "ratchet_upstream_retries", "Calls offered to another replica", ["reason"], registry=registry
        )
        self.upstream_up = Gauge(
            "ratchet_upstream_up", "1 when calls go there, else 0", ["upstream"], registry=registry
        )
        self.upstream_in_flight = Gauge(
            "ratchet_upstream_in_flight", "Calls whose answers have not ended", ["upstream"], registry=registry
        )
        self.canary_share = Gauge(
            "ratchet_canary_ratio", "Share of new trajectories for the canary", ["alias"], registry=registry
        )
        self.canary_trajectories = Counter(
            "ratchet_canary_trajectories",
            "New trajectories while there is a canary",
            ["alias", "policy"],
            registry=registry,
        )
        self.adapter_loads = Counter(
            "ratchet_adapter_loads",
            "Adapters loaded because a replica did not know them",
            ["outcome"],
            registry=registry,
        )
        self.store = StoreStatus(
            Gauge("ratchet_store_up", "1 when the store was read and written last time, else 0", registry=registry)
        )
        self.journal_bytes = Gauge("ratchet_journal_bytes", "Bytes of records in the journal", registry=registry)
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

        self.tool_calls = Counter(
            "ratchet_tool_calls", "Tool calls, held against their request's schemas", ["tool", "outcome"],
            registry=registry,
        )  # fmt: skip
        self.tool_results = Counter(
            "ratchet_tool_results", "What the next request says came of tool calls", ["tool", "result"],
            registry=registry,
        )  # fmt: skip
        registry.register(_LogLines())
        self.exact_splices = Counter(
            "ratchet_exact_splices", "Continuations by what exact_context made of them", ["outcome"], registry=registry
        )
        self.exact_fallbacks = Counter(
            "ratchet_exact_fallbacks", "Calls answered by plain chat because exact_context failed", ["reason"],
            registry=registry,
        )  # fmt: skip
        self.exact_lag_seconds = Histogram(
            "ratchet_exact_lag_seconds", "From the arrival of streamed ids to their words", buckets=_TOKEN_BUCKETS,
            registry=registry,
        )  # fmt: skip
        self.lag_seconds = Gauge(
            "ratchet_journal_lag_seconds", "Age of the oldest record that is not in the store yet", registry=registry
        )
        build = Gauge("ratchet_build_info", "1, with what is running", ["version", "python"], registry=registry)
        build.labels(_version(), platform.python_version()).set(1)

    def refused(self, error: ProxyError | None) -> None:
        """Count a request that ended before it was a call; None is a defect of ours."""
        self.errors.labels("defect" if error is None else error_label(error)).inc()

    def set_held_bytes(self, what: str, size: Callable[[], int]) -> None:
        """Show how many bytes something holds."""
        self._held.labels(what).set_function(size)

    def watch_upstream(self, url: str, up: Callable[[], bool], in_flight: Callable[[], int]) -> None:
        """Read an upstream's gauges where they are kept."""
        self.upstream_up.labels(url).set_function(up)
        self.upstream_in_flight.labels(url).set_function(in_flight)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /metrics."""
        await send_bytes(
            send, 200, generate_latest(self.registry), [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]
        )


class _LogLines(Collector):
    """What the log of this process has dropped; it is one for all proxies in it."""

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the one counter."""
        yield CounterMetricFamily(
            "ratchet_log_lines_dropped", "Lines of the log not written", value=logs.dropped_lines()
        )


def error_label(error: ProxyError) -> str:
    """Return the class of an error as a label: `upstream_timeout` of UpstreamTimeout."""
    return _WORD_BORDER.sub("_", type(error).__name__).lower()


def _version() -> str:
    try:
        return version("ratchet-rl")
    except PackageNotFoundError:  # run from its folder
        return "unknown"
