"""The finding of a check: a number, its alarm, and the remedy."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ratchet.store.errors import StoreError
from ratchet.store.records import JudgeRequest, Round
from ratchet.store.states import ResampleState, RoundState
from ratchet.store.store import Store
from ratchet.trainer.errors import SettingError
from ratchet.trainer.observability.progress import PhaseProgress
from ratchet.trainer.statistics import MeanDifference


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


# The trainer's Prometheus metrics, served by its own HTTP server. docs/metrics.md documents every name.
#
# Counts that the store keeps (drops, active alarms) are read on each scrape, so they survive restarts; they are missing
# while the store does not answer. All other values are counted by this process.

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


class MetricsRegistry:
    """The metrics of all agents of a process, in one registry that one port serves."""

    def __init__(self, store: Store | None = None) -> None:
        self.registry = registry = CollectorRegistry()
        self.paused = Gauge("ratchet_training_paused", "1 while no step is taken", ["alias"], registry=registry)
        self.findings = {
            name: Gauge(name, text, ["alias", label] if label else ["alias"], registry=registry)
            for name, (text, label) in _FINDING_METRICS.items()
        }
        self.round = {
            name: Gauge(name, text, ["alias"], registry=registry) for name, (_, text) in _ROUND_METRICS.items()
        }
        self.rounds = Counter("ratchet_rounds", "Rounds by their end", ["alias", "state"], registry=registry)
        self.untrained = Counter(
            "ratchet_untrained_tokens", "Sampled tokens of trained trajectories without loss", ["alias", "reason"],
            registry=registry,
        )  # fmt: skip
        self.judge_tokens = Counter(
            "ratchet_judge_tokens", "Tokens of the judge's requests to models: prompt, completion", ["alias", "kind"],
            registry=registry,
        )  # fmt: skip
        phase = ["alias", "phase"]
        self.done = Gauge("ratchet_progress_items_done", "Items done of a long phase", phase, registry=registry)
        self.total = Gauge("ratchet_progress_items", "Items of a long phase", phase, registry=registry)
        self.pace = Gauge("ratchet_progress_seconds_per_item", "Mean seconds per item so far", phase, registry=registry)
        self.eta = Gauge("ratchet_progress_eta_seconds", "Seconds left at this pace", phase, registry=registry)
        self.mean = Gauge(
            "ratchet_progress_mean", "Running mean, each metric over the rows that have it", [*phase, "metric"],
            registry=registry,
        )  # fmt: skip
        self.harm = Gauge(
            "ratchet_release_harm", "Evidence that the versions before the newest one that serves do better", ["alias"],
            registry=registry,
        )  # fmt: skip
        self.counted = Gauge(
            "ratchet_release_counted", "Scored trajectories of the newest ramp", ["alias"], registry=registry
        )
        self.difference = Gauge(
            "ratchet_release_difference", "Mean score of everything since the anchor, less the anchor's",
            ["alias", "bound"], registry=registry,
        )  # fmt: skip
        self.evaluating = Gauge(
            "ratchet_evaluation_running", "1 while a candidate is evaluated", ["alias"], registry=registry
        )
        self._stored = _Stored(store) if store is not None else None
        if self._stored is not None:
            registry.register(self._stored)

    def add_agent(self, alias: str) -> None:
        if self._stored is not None:
            self._stored.aliases = tuple(dict.fromkeys((*self._stored.aliases, alias)))

    def remove_agent(self, alias: str) -> None:
        """Show nothing of an agent any more."""
        if self._stored is not None:
            self._stored.aliases = tuple(one for one in self._stored.aliases if one != alias)
        gauges = (self.paused, *self.findings.values(), *self.round.values(), self.done, self.total, self.pace)
        for metric in (*gauges, self.eta, self.mean, self.harm, self.counted, self.difference, self.evaluating):
            _remove_agent(metric, alias)

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
        self.process.add_agent(alias)
        self.process.paused.labels(alias).set(0)
        self._counted: set[str] = set()  # ids of rounds

    @property
    def registry(self) -> CollectorRegistry:
        return self.process.registry

    def findings(self, findings: Sequence[Finding], *, paused: bool) -> None:
        """Show the findings of the sentinel's last check only."""
        self.process.paused.labels(self._alias).set(paused)
        for name, (_, label) in _FINDING_METRICS.items():
            gauge = self.process.findings[name]
            _remove_agent(gauge, self._alias)
            for one in [finding for finding in findings if finding.metric == name][:_MAX_SUBJECTS]:
                subject = (one.subject[:_SUBJECT_CHARS],) if label else ()
                gauge.labels(self._alias, *subject).set(one.value)

    def rounds(self, newest: Sequence[Round]) -> None:
        """Count the rounds that ended since the last call, newest first, and show the newest committed one."""
        ended = [one for one in newest if one.state is not RoundState.STARTED]
        for one in ended:
            if one.id not in self._counted:
                self.process.rounds.labels(self._alias, str(one.state)).inc()
                for reason, tokens in (one.metrics.get("untrained_tokens") or {}).items():
                    self.process.untrained.labels(self._alias, reason).inc(tokens)
        self._counted = {one.id for one in ended}
        committed = next((one for one in ended if one.state is RoundState.COMMITTED), None)
        for name, (key, _) in _ROUND_METRICS.items():
            if committed is not None and key in committed.metrics:
                self.process.round[name].labels(self._alias).set(committed.metrics[key])

    def judge_requests(self, requests: Sequence[JudgeRequest]) -> None:
        for one in requests:
            self.process.judge_tokens.labels(self._alias, "prompt").inc(one.prompt_tokens)
            self.process.judge_tokens.labels(self._alias, "completion").inc(one.completion_tokens)

    def release(self, harm: float, counted: int, difference: MeanDifference | None) -> None:
        """Show the evidence about the newest version that serves, and its ramp's scored trajectories."""
        self.process.harm.labels(self._alias).set(harm)
        self.process.counted.labels(self._alias).set(counted)
        _remove_agent(self.process.difference, self._alias)
        if difference is not None:
            for bound, value in (("value", difference.value), ("low", difference.low), ("high", difference.high)):
                self.process.difference.labels(self._alias, bound).set(value)

    def evaluating(self, running: bool) -> None:
        self.process.evaluating.labels(self._alias).set(running)

    def progress(self, progress: PhaseProgress) -> None:
        """Show the progress of a phase. After its end the last values stay until it begins again."""
        labels = (self._alias, progress.phase)
        self.process.done.labels(*labels).set(progress.done)
        self.process.total.labels(*labels).set(progress.total)
        self.process.pace.labels(*labels).set(progress.seconds_per_item or 0.0)
        self.process.eta.labels(*labels).set(progress.eta_seconds or 0.0)
        for name, value in progress.means.items():
            self.process.mean.labels(*labels, name).set(value)


def _remove_agent(gauge: Gauge, alias: str) -> None:
    samples = [sample for family in gauge.collect() for sample in family.samples]
    for sample in samples:
        if sample.labels["alias"] == alias:
            gauge.remove(*sample.labels.values())


_Family = CounterMetricFamily | GaugeMetricFamily


class _Stored(Collector):
    """Counts that the store keeps."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.aliases: tuple[str, ...] = ()

    def describe(self) -> Iterable[Metric]:
        """Return the names without reading the store."""
        return _families().values()

    def collect(self) -> Iterable[Metric]:
        """Read the store; if it does not answer, return what was read so far."""
        families = _families()
        try:
            self._read(families)
            for alias in self.aliases:
                self._read_groups(alias, families)
                self._read_policies(alias, families)
        except StoreError as error:
            log.warning("event=metrics_without_store reason=%r", str(error))
        return families.values()

    def _read(self, families: Mapping[str, _Family]) -> None:
        for reason, count in self._store.trajectories.drop_counts().items():
            families["ratchet_trajectories_dropped"].add_metric([reason], count)
        for alarm in self._store.alarms.active():
            families["ratchet_alarm_active"].add_metric([alarm.name], 1)

    def _read_groups(self, alias: str, families: Mapping[str, _Family]) -> None:
        for reason, count in self._store.groups.drop_counts(alias).items():
            families["ratchet_groups_dropped"].add_metric([alias, reason], count)
        counts = self._store.resamples.counts(alias)
        for state in (state for state in counts if state in (ResampleState.ANSWERED, ResampleState.FAILED)):
            families["ratchet_resample_calls"].add_metric([alias, str(state)], counts[state].count)
        if ResampleState.ANSWERED in counts:
            families["ratchet_resample_tokens"].add_metric([alias], counts[ResampleState.ANSWERED].tokens)

    def _read_policies(self, alias: str, families: Mapping[str, _Family]) -> None:
        live = self._store.policies.live().get(alias)
        if live is not None:
            families["ratchet_live_version"].add_metric([alias], live.version)
        unproven = len(self._store.policies.list_unproven(alias))
        families["ratchet_unproven_versions"].add_metric([alias], unproven)
        held = self._store.policies.awaiting_approval(alias)
        families["ratchet_release_pending_approval"].add_metric([alias], int(held is not None))
        for action, count in self._store.decisions.counts(alias).items():
            families["ratchet_policy_decisions"].add_metric([alias, str(action)], count)


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
            "Versions newer than the live one whose proof is undecided",
            labels=["alias"],
        ),
        GaugeMetricFamily("ratchet_release_pending_approval", "1 while a version needs approval", labels=["alias"]),
        CounterMetricFamily("ratchet_policy_decisions", "Decisions about versions", labels=["alias", "action"]),
    )
    return {family.name: family for family in families}
