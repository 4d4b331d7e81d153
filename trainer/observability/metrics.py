"""The trainer's Prometheus metrics, served by its own HTTP server. docs/metrics.md documents every name.

Counts that the store keeps (drops, active alarms) are read on each scrape, so they survive restarts; they are missing
while the store does not answer. All other values are counted by this process.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ratchet.store.errors import StoreError
from ratchet.store.operation_records import JobProgress
from ratchet.store.records import JudgeRequest, Round
from ratchet.store.states import ResampleState, RoundState
from ratchet.store.store import Store
from ratchet.trainer.errors import SettingError
from ratchet.trainer.statistics import MeanDifference

disable_created_metrics()  # type: ignore[no-untyped-call]  # an additional sample per counter with its creation time

log = logging.getLogger(__name__)

_MAX_SUBJECTS = 100  # tools or families per metric: agents choose their names
_SUBJECT_CHARS = 64

# Metrics of the sentinel's findings: name -> help, and whether the subject is a tool.
_FINDING_METRICS = {
    "ratchet_tool_failure_ratio": ("Share of a tool's newest fitting calls that failed", "tool"),
    "ratchet_tool_use_ratio": ("Share of the trajectories that were offered a tool and used it", "tool"),
    "ratchet_resource_use_ratio": ("Share of the often shown files, addresses and ids that tool calls name", None),
    "ratchet_trajectory_tokens": ("Sampled tokens per trajectory", None),
    "ratchet_reasoning_tokens_per_action": ("Reasoning tokens per tool call or answer", None),
    "ratchet_actions_per_trajectory": ("Tool calls and answers per trajectory", None),
    "ratchet_hallucinated_argument_ratio": ("Share of tool arguments that occur nowhere in their context", None),
    "ratchet_unnecessary_tool_calls": ("Tool calls per trajectory on tasks that are solved without any", None),
    "ratchet_second_judge_tau": ("Kendall's tau between the first and the second judge", None),
    "ratchet_logprob_mismatch_nats": ("Mean |trainer - engine| logprob of the last rounds", None),
    "ratchet_untrained_token_ratio": ("Share of sampled tokens that the last rounds did not train", None),
    "ratchet_rejected_row_ratio": ("Share of the newest round's rows that the off-policy limit rejected", None),
    "ratchet_invalid_tool_call_ratio": ("Share of a version's tool calls that were invalid", "version"),
    "ratchet_question_ratio": ("Share of a version's answers that ask in place of acting", "version"),
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
# The other metrics that this process keeps: name -> help, and the labels beside the alias.
_GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "ratchet_training_paused": ("1 while no step is taken", ()),
    "ratchet_progress_items_done": ("Items done of a long phase", ("phase",)),
    "ratchet_progress_items": ("Items of a long phase", ("phase",)),
    "ratchet_progress_seconds_per_item": ("Mean seconds per item so far", ("phase",)),
    "ratchet_progress_eta_seconds": ("Seconds left at this pace", ("phase",)),
    "ratchet_progress_mean": ("Running mean, each metric over the rows that have it", ("phase", "metric")),
    "ratchet_release_harm": ("Evidence that the versions before the newest one that serves do better", ()),
    "ratchet_release_counted": ("Scored trajectories of the newest ramp", ()),
    "ratchet_release_difference": ("Mean score of everything since the anchor, less the anchor's", ("bound",)),
    "ratchet_evaluation_running": ("1 while a candidate is evaluated", ()),
    **{name: (text, (label,) if label else ()) for name, (text, label) in _FINDING_METRICS.items()},
    **{name: (text, ()) for name, (_, text) in _ROUND_METRICS.items()},
}
_COUNTERS = {
    "ratchet_rounds": ("Rounds by their end", "state"),
    "ratchet_untrained_tokens": ("Sampled tokens of trained trajectories without loss", "reason"),
    "ratchet_judge_tokens": ("Tokens of the judge's requests to models: prompt, completion", "kind"),
}
# What the store keeps: name -> kind, help, labels.
_STORED: dict[str, tuple[type[CounterMetricFamily | GaugeMetricFamily], str, tuple[str, ...]]] = {
    "ratchet_trajectories_dropped": (CounterMetricFamily, "Trajectories that were dropped", ("reason",)),
    "ratchet_groups_dropped": (CounterMetricFamily, "Groups that were dropped", ("alias", "reason")),
    "ratchet_alarm_active": (GaugeMetricFamily, "1 for every alarm that is not cleared", ("name",)),
    "ratchet_resample_calls": (CounterMetricFamily, "Resample calls by their end", ("alias", "state")),
    "ratchet_resample_tokens": (CounterMetricFamily, "Tokens of answered resample calls", ("alias",)),
    "ratchet_live_version": (GaugeMetricFamily, "Version that is live", ("alias",)),
    "ratchet_unproven_versions": (
        GaugeMetricFamily,
        "Versions newer than the live one whose proof is undecided",
        ("alias",),
    ),
    "ratchet_release_pending_approval": (GaugeMetricFamily, "1 while a version needs approval", ("alias",)),
    "ratchet_policy_decisions": (CounterMetricFamily, "Decisions about versions", ("alias", "action")),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check measured about one subject.

    check            name of the check and of its alarm
    metric           the metric that shows the value
    subject          the tool or task family, "" for the whole alias
    value            the measurement
    reason           why it is an alarm, in one sentence with the remedy; None if there is no problem
    blocks_training  whether training waits until it is gone
    blocks_release   whether no version is promoted without an approval
    """

    check: str
    metric: str
    subject: str
    value: float
    reason: str | None = None
    blocks_training: bool = False
    blocks_release: bool = False


class MetricsRegistry:
    """The metrics of all agents of a process, in one registry that one port serves."""

    def __init__(self, store: Store | None = None) -> None:
        self.registry = CollectorRegistry()
        self.gauges = {
            name: Gauge(name, text, ("alias", *labels), registry=self.registry)
            for name, (text, labels) in _GAUGES.items()
        }
        self.counters = {
            name: Counter(name, text, ("alias", label), registry=self.registry)
            for name, (text, label) in _COUNTERS.items()
        }
        self._stored = _Stored(store) if store is not None else None
        if self._stored is not None:
            self.registry.register(self._stored)

    def add_agent(self, alias: str) -> None:
        if self._stored is not None:
            self._stored.aliases[alias] = None

    def remove_agent(self, alias: str) -> None:
        """Show nothing of an agent any more."""
        if self._stored is not None:
            self._stored.aliases.pop(alias, None)
        for gauge in self.gauges.values():
            _remove_agent(gauge, alias)

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


class TrainerMetrics:
    """The metrics of one alias, in the registry of its process or in one of their own."""

    def __init__(self, alias: str, store: Store | None = None, metrics: MetricsRegistry | None = None) -> None:
        self._alias = alias
        self.process = metrics or MetricsRegistry(store)
        self.registry = self.process.registry
        self.process.add_agent(alias)
        self._set("ratchet_training_paused", 0)
        self._counted: set[str] = set()  # ids of rounds

    def _set(self, name: str, value: float, *labels: str) -> None:
        self.process.gauges[name].labels(self._alias, *labels).set(value)

    def _count(self, name: str, label: str, number: float = 1) -> None:
        self.process.counters[name].labels(self._alias, label).inc(number)

    def findings(self, findings: Sequence[Finding], *, paused: bool) -> None:
        """Show the findings of the sentinel's last check only."""
        self._set("ratchet_training_paused", paused)
        for name, (_, label) in _FINDING_METRICS.items():
            _remove_agent(self.process.gauges[name], self._alias)
            for one in [finding for finding in findings if finding.metric == name][:_MAX_SUBJECTS]:
                self._set(name, one.value, *((one.subject[:_SUBJECT_CHARS],) if label else ()))

    def rounds(self, newest: Sequence[Round]) -> None:
        """Count the rounds that ended since the last call, newest first, and show the newest committed one."""
        ended = [one for one in newest if one.state is not RoundState.STARTED]
        for one in ended:
            if one.id not in self._counted:
                self._count("ratchet_rounds", str(one.state))
                for reason, tokens in (one.metrics.get("untrained_tokens") or {}).items():
                    self._count("ratchet_untrained_tokens", reason, tokens)
        self._counted = {one.id for one in ended}
        committed = next((one for one in ended if one.state is RoundState.COMMITTED), None)
        for name, (key, _) in _ROUND_METRICS.items():
            if committed is not None and key in committed.metrics:
                self._set(name, committed.metrics[key])

    def judge_requests(self, requests: Sequence[JudgeRequest]) -> None:
        for one in requests:
            self._count("ratchet_judge_tokens", "prompt", one.prompt_tokens)
            self._count("ratchet_judge_tokens", "completion", one.completion_tokens)

    def release(self, harm: float, counted: int, difference: MeanDifference | None) -> None:
        """Show the evidence about the newest version that serves, and its ramp's scored trajectories."""
        self._set("ratchet_release_harm", harm)
        self._set("ratchet_release_counted", counted)
        _remove_agent(self.process.gauges["ratchet_release_difference"], self._alias)
        if difference is not None:
            for bound in ("value", "low", "high"):
                self._set("ratchet_release_difference", getattr(difference, bound), bound)

    def evaluating(self, running: bool) -> None:
        self._set("ratchet_evaluation_running", running)

    def progress(self, progress: JobProgress) -> None:
        """Show the progress of a phase. After its end the last values stay until it begins again."""
        self._set("ratchet_progress_items_done", progress.done, progress.phase)
        self._set("ratchet_progress_items", progress.total, progress.phase)
        self._set("ratchet_progress_seconds_per_item", progress.seconds_per_item or 0.0, progress.phase)
        self._set("ratchet_progress_eta_seconds", progress.eta_seconds or 0.0, progress.phase)
        for name, value in progress.means.items():
            self._set("ratchet_progress_mean", value, progress.phase, name)


def _remove_agent(gauge: Gauge, alias: str) -> None:
    samples = [sample for family in gauge.collect() for sample in family.samples]
    for sample in samples:
        if sample.labels["alias"] == alias:
            gauge.remove(*sample.labels.values())


_Families = dict[str, CounterMetricFamily | GaugeMetricFamily]


class _Stored(Collector):
    """Counts that the store keeps."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.aliases: dict[str, None] = {}  # agents come and go in threads of their own

    def describe(self) -> Iterable[Metric]:
        """Return the names without reading the store."""
        return _families().values()

    def collect(self) -> Iterable[Metric]:
        """Read the store; if it does not answer, return what was read so far."""
        families = _families()
        try:
            for reason, count in self._store.trajectories.drop_counts().items():
                families["ratchet_trajectories_dropped"].add_metric([reason], count)
            for alarm in self._store.alarms.active():
                families["ratchet_alarm_active"].add_metric([alarm.name], 1)
            for alias in tuple(self.aliases):
                self._read(alias, families)
        except StoreError as error:
            log.warning("event=metrics_without_store reason=%r", str(error))
        return families.values()

    def _read(self, alias: str, families: _Families) -> None:
        store = self._store
        for reason, count in store.groups.drop_counts(alias).items():
            families["ratchet_groups_dropped"].add_metric([alias, reason], count)
        counts = store.resamples.counts(alias)
        for state in (state for state in counts if state in (ResampleState.ANSWERED, ResampleState.FAILED)):
            families["ratchet_resample_calls"].add_metric([alias, str(state)], counts[state].count)
        if ResampleState.ANSWERED in counts:
            families["ratchet_resample_tokens"].add_metric([alias], counts[ResampleState.ANSWERED].tokens)
        live = store.policies.live().get(alias)
        if live is not None:
            families["ratchet_live_version"].add_metric([alias], live.version)
        families["ratchet_unproven_versions"].add_metric([alias], len(store.policies.list_unproven(alias)))
        held = store.policies.awaiting_approval(alias)
        families["ratchet_release_pending_approval"].add_metric([alias], int(held is not None))
        for action, count in store.decisions.counts(alias).items():
            families["ratchet_policy_decisions"].add_metric([alias, str(action)], count)


def _families() -> _Families:
    return {name: kind(name, text, labels=labels) for name, (kind, text, labels) in _STORED.items()}
