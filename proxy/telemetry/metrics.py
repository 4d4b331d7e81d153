"""The proxy's Prometheus metrics. docs/metrics.md documents every name; labels are few and bounded.

`call_telemetry.py` counts the end of each call. Gauges over state that exists anyway (the backlog, the versions) are
read when Prometheus scrapes.
"""

from __future__ import annotations

import contextlib
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.types import Receive, Scope, Send

from ratchet.proxy.errors import ProxyError
from ratchet.proxy.telemetry import logs
from ratchet.proxy.wire.asgi import send_bytes
from ratchet.store.records import Policy
from ratchet.store.states import SERVING, PolicyState

disable_created_metrics()  # type: ignore[no-untyped-call]  # they would double the samples of every counter

_CALL_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
_SHORT_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1)
_WORD_BORDER = re.compile(r"(?<=[a-z])(?=[A-Z])")
_IN_USE = (PolicyState.CANDIDATE, *SERVING)

INTERNAL_ERROR = "internal_error"  # error label of a bug in the proxy


class ProxyMetrics:
    """The metrics, in a registry of their own, so that one process can run several proxies."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.open_calls = 0  # a plain number, since every call changes it twice
        self._add_call_metrics()
        self._add_token_metrics()
        self._add_upstream_metrics()
        self._add_version_metrics()
        self._add_journal_metrics()
        self._add_process_metrics()

    def _add_call_metrics(self) -> None:
        self.calls = self._counter(
            "ratchet_calls", "Captured calls by their end", "alias", "dialect", "state", "purpose"
        )
        self.errors = self._counter("ratchet_errors", "Failed requests by class of error", "class")
        in_flight = self._gauge("ratchet_calls_in_flight", "Captured calls that have not ended")
        in_flight.set_function(lambda: self.open_calls)
        self.requests_waiting = self._gauge(
            "ratchet_requests_waiting", "Requests that wait because a limit of parallel requests is reached"
        )
        self.call_seconds = self._histogram(
            "ratchet_call_duration_seconds", "From request to last byte", _CALL_BUCKETS, "alias"
        )
        self.first_token_seconds = self._histogram(
            "ratchet_time_to_first_token_seconds", "From request to first token, streamed calls", _CALL_BUCKETS, "alias"
        )
        self.inter_token_seconds = self._histogram(
            "ratchet_inter_token_latency_seconds", "Mean time between tokens, streamed calls", _TOKEN_BUCKETS, "alias"
        )
        self.overhead_seconds = self._histogram(
            "ratchet_overhead_seconds", "Time per call spent in the proxy, not in the upstream", _SHORT_BUCKETS
        )
        self.links = self._counter("ratchet_links", "Calls by how their trajectory was found", "alias", "linked_by")
        self.trajectories = self._gauge("ratchet_trajectories_open", "Trajectories in the memory of linking")
        self.coordinator_up = self._gauge(
            "ratchet_coordinator_up", "1 while the coordinator places this worker's calls, else 0; 1 with one worker"
        )
        self.coordinator_up.set(1)
        self.late_ends = self._counter(
            "ratchet_late_ends", "Answers whose last byte waited for the coordinator for more than 250 ms"
        )
        self.feedback = self._counter("ratchet_feedback", "Feedback that was accepted", "state")
        self.alarm_messages = self._counter("ratchet_alarm_messages", "Messages to the alarm webhook", "result")
        self.tool_calls = self._counter(
            "ratchet_tool_calls", "Sampled tool calls, checked against the schemas of their request", "tool", "outcome"
        )
        self.tool_results = self._counter(
            "ratchet_tool_results", "Outcomes of tool calls, from the request that follows", "tool", "result"
        )

    def _add_token_metrics(self) -> None:
        self.tokens = self._counter("ratchet_tokens", "Tokens of captured calls", "alias", "kind", "purpose")
        self.key_calls = self._counter("ratchet_key_calls", "Captured calls by key", "key", "alias", "state")
        self.key_tokens = self._counter("ratchet_key_tokens", "Tokens of captured calls by key", "key", "alias", "kind")
        self.context_tokens = self._counter(
            "ratchet_context_tokens", "Completion tokens by how their context is known", "alias", "context"
        )
        self.untrainable = self._counter(
            "ratchet_untrainable_calls", "Calls whose tokens cannot be trained", "alias", "reason"
        )
        self.exact_splices = self._counter(
            "ratchet_exact_splices", "Continuations by the outcome of exact_context", "outcome"
        )
        self.exact_fallbacks = self._counter(
            "ratchet_exact_fallbacks", "Calls answered by plain chat because exact_context failed", "reason"
        )
        self.exact_lag_seconds = self._histogram(
            "ratchet_exact_lag_seconds", "From the arrival of streamed ids to their text", _TOKEN_BUCKETS
        )

    def _add_upstream_metrics(self) -> None:
        self.upstream_errors = self._counter("ratchet_upstream_errors", "Upstream failures", "kind")
        self.upstream_retries = self._counter("ratchet_upstream_retries", "Calls sent to another replica", "reason")
        self.fallbacks = self._counter(
            "ratchet_fallbacks", "Calls that another model was asked to answer", "alias", "model", "reason"
        )
        self.upstream_up = self._gauge("ratchet_upstream_up", "1 if the replica receives calls, else 0", "upstream")
        self.upstream_in_flight = self._gauge(
            "ratchet_upstream_in_flight", "Calls whose responses have not ended", "upstream"
        )
        self.adapter_loads = self._counter(
            "ratchet_adapter_loads", "Adapters loaded because a replica did not have them", "outcome"
        )

    def _add_version_metrics(self) -> None:
        self.live_version = self._gauge("ratchet_policy_version", "Version of new trajectories", "alias")
        self.version_share = self._gauge(
            "ratchet_version_share_ratio",
            "Share of new trajectories of the version that is live, in its ramp, or held back",
            "alias",
            "role",
        )
        self.version_trajectories = self._counter(
            "ratchet_version_trajectories",
            "New trajectories by the role of the version that they drew",
            "alias",
            "role",
        )

    def _add_journal_metrics(self) -> None:
        self.store = StoreStatus(
            self._gauge("ratchet_store_up", "1 if the store's last read and write succeeded, within 5 s; else 0")
        )
        self.journal_bytes = self._gauge("ratchet_journal_bytes", "Bytes of records in the journal")
        self.unshipped = self._gauge("ratchet_journal_unshipped_records", "Records that are not in the store yet")
        self.lag_seconds = self._gauge(
            "ratchet_journal_lag_seconds", "Age of the oldest record that is not in the store yet"
        )
        self.commit_seconds = self._histogram(
            "ratchet_journal_commit_seconds", "Duration of a group commit", _SHORT_BUCKETS
        )
        self.journal_errors = self._counter("ratchet_journal_errors", "Failed writes to the journal")
        self.lost = self._counter(
            "ratchet_journal_lost_records", "Records lost: no space, or a segment deleted or damaged"
        )
        self.shipped = self._counter("ratchet_shipped_records", "Records written to the store")
        self.ship_failures = self._counter("ratchet_ship_failures", "Batches that could not be written to the store")
        self.dead_letters = self._counter("ratchet_dead_letters", "Records that the store rejects")

    def _add_process_metrics(self) -> None:
        self._memory_bytes = self._gauge("ratchet_memory_bytes", "Bytes held in memory, estimated", "component")
        self.registry.register(_DroppedLogLines())
        build = self._gauge("ratchet_build_info", "Always 1; the labels name the build", "version", "python")
        build.labels(_version(), platform.python_version()).set(1)

    def _counter(self, name: str, description: str, *labels: str) -> Counter:
        return Counter(name, description, labels, registry=self.registry)

    def _gauge(self, name: str, description: str, *labels: str) -> Gauge:
        return Gauge(name, description, labels, registry=self.registry)

    def _histogram(self, name: str, description: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(name, description, labels, buckets=buckets, registry=self.registry)

    def count_error(self, error: ProxyError | None) -> None:
        """Count a request that failed before its call began; None for a bug in the proxy."""
        self.errors.labels(INTERNAL_ERROR if error is None else error_label(error)).inc()

    def forget_agent(self, alias: str) -> None:
        """Remove the gauges of an agent that left; its counters stay."""
        with contextlib.suppress(KeyError):
            self.live_version.remove(alias)
        for role in SERVING:
            with contextlib.suppress(KeyError):
                self.version_share.remove(alias, role)

    def watch_memory(self, component: str, size: Callable[[], int]) -> None:
        """Expose the bytes that a component holds."""
        self._memory_bytes.labels(component).set_function(size)

    def watch_upstream(self, url: str, up: Callable[[], bool], in_flight: Callable[[], int]) -> None:
        """Expose the state of an upstream."""
        self.upstream_up.labels(url).set_function(up)
        self.upstream_in_flight.labels(url).set_function(in_flight)

    def forget_upstream(self, url: str) -> None:
        """Stop exposing an upstream."""
        self.upstream_up.remove(url)
        self.upstream_in_flight.remove(url)

    def watch_policies(self, list_versions: Callable[[], Iterable[Policy]]) -> None:
        """Expose the versions in use as `ratchet_policy_info`."""
        self.registry.register(_PolicyInfo(list_versions))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /metrics."""
        await send_bytes(
            send, 200, generate_latest(self.registry), [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]
        )


class StoreStatus:
    """The last outcome of each kind of use of the store; `ratchet_store_up` is 1 if none failed.

    Each kind counts by itself: a store on a full disk still answers reads. Any thread may report.
    """

    def __init__(self, gauge: Gauge) -> None:
        self._failing: dict[str, None] = {"reading": None}  # until the first read
        gauge.set_function(lambda: float(self.is_up))

    @property
    def is_up(self) -> bool:
        """Whether no kind of use failed."""
        return not self._failing

    def report(self, use: str, *, ok: bool) -> None:
        """Record the outcome of a use of the store."""
        if ok:
            self._failing.pop(use, None)
        else:
            self._failing[use] = None


class _PolicyInfo(Collector):
    """One series per version in use. Retired and rejected versions are left out: their number only grows."""

    def __init__(self, list_versions: Callable[[], Iterable[Policy]]) -> None:
        self._list_versions = list_versions

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the one family."""
        family = GaugeMetricFamily("ratchet_policy_info", "1 per version in use", labels=["alias", "version", "state"])
        for policy in self._list_versions():
            if policy.state in _IN_USE:
                family.add_metric([policy.alias, str(policy.version), str(policy.state)], 1)
        yield family


class _DroppedLogLines(Collector):
    """The log lines that this process has dropped, counted once for all proxies in it."""

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the one counter."""
        yield CounterMetricFamily("ratchet_log_lines_dropped", "Log lines not written", value=logs.dropped_lines())


def error_label(error: ProxyError) -> str:
    """Return the class of an error as a label: `upstream_timeout` for UpstreamTimeout."""
    return _WORD_BORDER.sub("_", type(error).__name__).lower()


def _version() -> str:
    try:
        return version("ratchet-rl")
    except PackageNotFoundError:  # run from its folder
        return "unknown"
