"""The trainer's Prometheus metrics, served by its own HTTP server. docs/metrics.md documents every name.

Counts that the store keeps (drops, active alarms) are read on each scrape, so they survive restarts; they are missing
while the store does not answer. All other values are counted by this process.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ratchet.store.errors import StoreError
from ratchet.store.records import Round
from ratchet.store.states import ResampleState, RoundState
from ratchet.store.store import Store
from ratchet.trainer.errors import SettingError
from ratchet.trainer.observability.finding import Finding
from ratchet.trainer.observability.progress import PhaseProgress
from ratchet.trainer.statistics.sequential_test import Difference

disable_created_metrics()  # type: ignore[no-untyped-call]  # an additional sample per counter with its creation time

log = logging.getLogger(__name__)

_MAX_SUBJECTS = 100  # tools or families per metric: agents choose their names
_SUBJECT_CHARS = 64

# Metrics of the sentinel's findings: name -> help, and whether the subject is a tool.
_FINDING_METRICS = {
    "ratchet_tool_failure_ratio": ("Share of a tool's newest fitting calls that failed", True),
    "ratchet_tool_use_ratio": ("Share of the trajectories that were offered a tool and used it", True),
    "ratchet_resource_use_ratio": ("Share of the often shown files, addresses and ids that tool calls name", False),
    "ratchet_trajectory_tokens": ("Sampled tokens per trajectory", False),
    "ratchet_reasoning_tokens_per_action": ("Reasoning tokens per tool call or answer", False),
    "ratchet_actions_per_trajectory": ("Tool calls and answers per trajectory", False),
    "ratchet_hallucinated_argument_ratio": ("Share of tool arguments that occur nowhere in their context", False),
    "ratchet_unnecessary_tool_calls": ("Tool calls per trajectory on tasks that are solved without any", False),
    "ratchet_second_judge_tau": ("Kendall's tau between the first and the second judge", False),
    "ratchet_logprob_mismatch_nats": ("Mean |trainer - engine| logprob of the last rounds", False),
    "ratchet_untrained_token_ratio": ("Share of sampled tokens that the last rounds did not train", False),
}

# Metrics of the newest committed round: name -> (key of the round's metrics, help).
_ROUND_METRICS = {
    "ratchet_round_reward": ("reward", "Mean score of the newest round's trajectories"),
    "ratchet_round_loss": ("loss", "Loss of the newest round"),
    "ratchet_round_grad_norm": ("grad_norm", "Gradient norm of the newest round, before clipping"),
    "ratchet_round_entropy_nats": ("entropy", "Entropy of the policy at the trained tokens"),
    "ratchet_round_clip_ratio": ("clip_ratio", "Share of trained tokens that the clip silenced"),
    "ratchet_round_tokens": ("tokens_trained", "Tokens that the newest round trained"),
    "ratchet_round_seconds": ("seconds", "Time that the newest round's steps took"),
    "ratchet_round_learning_rate": ("learning_rate", "Learning rate of the newest round's steps"),
    "ratchet_round_approx_kl_nats": ("approx_kl", "Mean k3 by which the newest round moved the policy"),
    "ratchet_round_logprob_change_positive_nats": (
        "logprob_change_positive_mean",
        "Mean change of log p of tokens with a positive advantage",
    ),
}


class TrainerMetrics:
    """The metrics of one alias, in their own registry."""

    def __init__(self, alias: str, store: Store | None = None) -> None:
        self._alias = alias
        self.registry = registry = CollectorRegistry()
        self._paused = Gauge("ratchet_training_paused", "1 while no step is taken", ["alias"], registry=registry)
        self._paused.labels(alias).set(0)
        self._findings = {
            name: Gauge(name, text, ["alias", "tool"] if by_tool else ["alias"], registry=registry)
            for name, (text, by_tool) in _FINDING_METRICS.items()
        }
        self._round = {
            name: Gauge(name, text, ["alias"], registry=registry) for name, (_, text) in _ROUND_METRICS.items()
        }
        self._rounds = Counter("ratchet_rounds", "Rounds by their end", ["alias", "state"], registry=registry)
        self._untrained = Counter(
            "ratchet_untrained_tokens", "Sampled tokens of trained trajectories without loss", ["alias", "reason"],
            registry=registry,
        )  # fmt: skip
        phase = ["alias", "phase"]
        self._done = Gauge("ratchet_progress_items_done", "Items done of a long phase", phase, registry=registry)
        self._total = Gauge("ratchet_progress_items", "Items of a long phase", phase, registry=registry)
        self._pace = Gauge(
            "ratchet_progress_seconds_per_item", "Mean seconds per item so far", phase, registry=registry
        )
        self._eta = Gauge("ratchet_progress_eta_seconds", "Seconds left at this pace", phase, registry=registry)
        self._mean = Gauge(
            "ratchet_progress_mean", "Running mean, each metric over the rows that have it", [*phase, "metric"],
            registry=registry,
        )  # fmt: skip
        self._scores = Gauge(
            "ratchet_release_scores", "Scores of the canary, and of the live version beside it", ["alias", "side"],
            registry=registry,
        )  # fmt: skip
        self._difference = Gauge(
            "ratchet_release_difference", "Mean score of the canary, less the live one's", ["alias", "bound"],
            registry=registry,
        )  # fmt: skip
        self._evaluating = Gauge(
            "ratchet_evaluation_running", "1 while a candidate is evaluated", ["alias"], registry=registry
        )
        self._counted: set[str] = set()  # ids of rounds
        if store is not None:
            registry.register(_Stored(store, alias))

    def findings(self, findings: Sequence[Finding], *, paused: bool) -> None:
        """Show the findings of the sentinel's last check only."""
        self._paused.labels(self._alias).set(paused)
        for name, (_, by_tool) in _FINDING_METRICS.items():
            gauge = self._findings[name]
            gauge.clear()
            for one in [finding for finding in findings if finding.metric == name][:_MAX_SUBJECTS]:
                subject = (one.subject[:_SUBJECT_CHARS],) if by_tool else ()
                gauge.labels(self._alias, *subject).set(one.value)

    def rounds(self, newest: Sequence[Round]) -> None:
        """Count the rounds that ended since the last call, newest first, and show the newest committed one."""
        ended = [one for one in newest if one.state is not RoundState.STARTED]
        for one in ended:
            if one.id not in self._counted:
                self._rounds.labels(self._alias, str(one.state)).inc()
                for reason, tokens in (one.metrics.get("untrained_tokens") or {}).items():
                    self._untrained.labels(self._alias, reason).inc(tokens)
        self._counted = {one.id for one in ended}
        committed = next((one for one in ended if one.state is RoundState.COMMITTED), None)
        for name, (key, _) in _ROUND_METRICS.items():
            if committed is not None and key in committed.metrics:
                self._round[name].labels(self._alias).set(committed.metrics[key])

    def canary(self, canary: int = 0, live: int = 0, difference: Difference | None = None) -> None:
        """Show the number of scores of the canary and of the live version, and their difference; no canary: zeros."""
        self._difference.clear()
        for side, count in (("canary", canary), ("live", live)):
            self._scores.labels(self._alias, side).set(count)
        if difference is not None:
            for bound, value in (("value", difference.value), ("low", difference.low), ("high", difference.high)):
                self._difference.labels(self._alias, bound).set(value)

    def evaluating(self, running: bool) -> None:
        """Show whether a candidate is being evaluated."""
        self._evaluating.labels(self._alias).set(running)

    def progress(self, progress: PhaseProgress) -> None:
        """Show the progress of a phase. After its end the last values stay until it begins again."""
        labels = (self._alias, progress.phase)
        self._done.labels(*labels).set(progress.done)
        self._total.labels(*labels).set(progress.total)
        self._pace.labels(*labels).set(progress.seconds_per_item or 0.0)
        self._eta.labels(*labels).set(progress.eta_seconds or 0.0)
        for name, value in progress.means.items():
            self._mean.labels(*labels, name).set(value)

    def serve(self, host: str, port: int) -> int:
        """Serve GET /metrics in a thread; return the port. Raises SettingError if it is taken."""
        try:
            server, _ = start_http_server(port, addr=host, registry=self.registry)
        except OSError as error:
            raise SettingError(
                f"trainer.metrics_port {port} at {host} cannot be used: {error.strerror}; choose another, or null"
            ) from error
        log.info("event=metrics_ready url=http://%s:%d/metrics", host, server.server_port)
        return int(server.server_port)


_Family = CounterMetricFamily | GaugeMetricFamily


class _Stored(Collector):
    """Counts that the store keeps."""

    def __init__(self, store: Store, alias: str) -> None:
        self._store = store
        self._alias = alias

    def describe(self) -> Iterable[Metric]:
        """Return the names without reading the store."""
        return _families().values()

    def collect(self) -> Iterable[Metric]:
        """Read the store; if it does not answer, return what was read so far."""
        families = _families()
        try:
            self._read(families)
            self._read_policies(families)
        except StoreError as error:
            log.warning("event=metrics_without_store reason=%r", str(error))
        return families.values()

    def _read(self, families: Mapping[str, _Family]) -> None:
        for reason, count in self._store.trajectories.drop_counts().items():
            families["ratchet_trajectories_dropped"].add_metric([reason], count)
        for reason, count in self._store.groups.drop_counts(self._alias).items():
            families["ratchet_groups_dropped"].add_metric([self._alias, reason], count)
        for alarm in self._store.alarms.active():
            families["ratchet_alarm_active"].add_metric([alarm.name], 1)
        counts = self._store.resamples.counts(self._alias)
        for state in (state for state in counts if state in (ResampleState.ANSWERED, ResampleState.FAILED)):
            families["ratchet_resample_calls"].add_metric([self._alias, str(state)], counts[state].count)
        if ResampleState.ANSWERED in counts:
            families["ratchet_resample_tokens"].add_metric([self._alias], counts[ResampleState.ANSWERED].tokens)

    def _read_policies(self, families: Mapping[str, _Family]) -> None:
        live = self._store.policies.live().get(self._alias)
        if live is not None:
            families["ratchet_live_version"].add_metric([self._alias], live.version)
        unproven = len(self._store.policies.list_unproven(self._alias))
        families["ratchet_unproven_versions"].add_metric([self._alias], unproven)
        held = self._store.policies.awaiting_approval(self._alias)
        families["ratchet_release_pending_approval"].add_metric([self._alias], int(held is not None))
        for action, count in self._store.decisions.counts(self._alias).items():
            families["ratchet_policy_decisions"].add_metric([self._alias, str(action)], count)


def _families() -> dict[str, _Family]:
    families: tuple[_Family, ...] = (
        CounterMetricFamily("ratchet_trajectories_dropped", "Trajectories that were dropped", labels=["reason"]),
        CounterMetricFamily("ratchet_groups_dropped", "Groups that were dropped", labels=["alias", "reason"]),
        GaugeMetricFamily("ratchet_alarm_active", "1 for every alarm that is not cleared", labels=["name"]),
        CounterMetricFamily("ratchet_resample_calls", "Resample calls by their end", labels=["alias", "state"]),
        CounterMetricFamily("ratchet_resample_tokens", "Tokens of answered resample calls", labels=["alias"]),
        GaugeMetricFamily("ratchet_live_version", "Version that is live", labels=["alias"]),
        GaugeMetricFamily(
            "ratchet_unproven_versions",
            "Versions that differ too little from the live one to be proven",
            labels=["alias"],
        ),
        GaugeMetricFamily("ratchet_release_pending_approval", "1 while a version needs approval", labels=["alias"]),
        CounterMetricFamily("ratchet_policy_decisions", "Decisions about versions", labels=["alias", "action"]),
    )
    return {family.name: family for family in families}
