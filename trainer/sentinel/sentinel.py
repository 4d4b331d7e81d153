"""The sentinel: checks of training rounds and of versions' behavior, their alarms, and the pause of training."""

from __future__ import annotations

import logging
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from ratchet.store.calls.trajectory_filter import TrajectoryFilter
from ratchet.store.reasons import describe_untrained
from ratchet.store.records import Round, Transcript
from ratchet.store.reports.learning_report import rejected_rows
from ratchet.store.states import RoundState, TrajectoryState
from ratchet.store.store import Store
from ratchet.trainer.judges.judge_runner import SECOND_JUDGE as AGREEMENT
from ratchet.trainer.judges.judge_runner import SecondJudge, agreement
from ratchet.trainer.observability.metrics import Finding, TrainerMetrics
from ratchet.trainer.rows.token_row import UNTRAINED_ROLE
from ratchet.trainer.sentinel.checks import CHECK as TOOL_HEALTH
from ratchet.trainer.sentinel.checks import (
    ToolHistory,
    TrajectoryBehavior,
    check_tool_health,
    read_behavior,
)
from ratchet.trainer.settings.trainer_settings import SentinelSettings
from ratchet.trainer.statistics import MIN_SIGMAS, MeanChange, mean_change

# Checks of the sentinel on rounds and versions: the round's metrics, rates by version, and drift.

# Checks of the last rounds: trainer and engine agree, most tokens were trained, and few rows rejected. Pure.

ROUND_CHECKS = frozenset({"logprob_mismatch", "untrained_tokens", "rows_rejected"})
MAX_ROUNDS = 5  # committed ones
_MAX_MISMATCH_NATS = 0.1  # mean |trainer - engine| logprob of fresh rows
_MAX_UNTRAINED_RATIO = 0.5  # of the sampled tokens


def check_rounds(rounds: Sequence[Round]) -> list[Finding]:
    """Return the findings of the newest committed rounds; none before the first commit. `rounds`: newest first."""
    committed = [one for one in rounds if one.state is RoundState.COMMITTED][:MAX_ROUNDS]
    if not committed:
        return []
    return [_check_mismatch(committed), _check_untrained(committed), _check_rejected(committed[0])]


def _check_mismatch(committed: Sequence[Round]) -> Finding:
    """Compare what the version sampled that a round starts from: the samples of older ones differ anyway."""
    tokens = [one.metrics.get("fresh_tokens_compared", 0) for one in committed]
    differences = [one.metrics.get("fresh_logprob_abs_diff_mean", 0.0) for one in committed]
    mean = sum(value * count for value, count in zip(differences, tokens, strict=True)) / max(1, sum(tokens))
    reason = None
    if mean >= _MAX_MISMATCH_NATS:
        reason = (
            f"the trainer's logprobs differ from the engine's by {mean:.3f} nats (mean of {sum(tokens)} tokens of "
            f"the last {len(committed)} rounds, sampled by the versions that they started from): check that both run "
            "the same weights, dtype and --logprobs-mode processed_logprobs"
        )
    return Finding("logprob_mismatch", "ratchet_logprob_mismatch_nats", "", mean, reason)


def _check_untrained(committed: Sequence[Round]) -> Finding:
    untrained: Counter[str] = Counter()
    for one in committed:
        untrained.update(one.metrics.get("untrained_tokens") or {})
    del untrained[UNTRAINED_ROLE]  # by configuration
    trained = sum(one.metrics.get("tokens_trained", 0) for one in committed)
    share = untrained.total() / max(1, untrained.total() + trained)
    reason = None
    if share >= _MAX_UNTRAINED_RATIO:
        reason = (
            f"{share:.0%} of the sampled tokens of the last {len(committed)} rounds were not trained; "
            f"{describe_untrained(untrained)}"
        )
    return Finding("untrained_tokens", "ratchet_untrained_token_ratio", "", share, reason)


def _check_rejected(newest: Round) -> Finding:
    found = rejected_rows(newest.metrics)
    share, reason = (found.share, found.alarm_reason()) if found is not None else (0.0, None)
    return Finding("rows_rejected", "ratchet_rejected_row_ratio", "", share, reason)


# Rates by version: invalid tool calls, and questions in place of actions. Pure, on behaviors.
#
# Both are what a policy learns to do if its judge can be fooled: a judge that likes polite answers rewards questions,
# and one that reads only the last answer does not see wrong calls. A version's rate is the mean share over its
# trajectories, so that a long trajectory counts once. The newest version is compared with all older ones in the window;
# an alarm needs an increase by `_MAX_RATE_INCREASE` and by `MIN_SIGMAS` pooled standard errors, and `MIN_TRAJECTORIES`
# on either side. While it lasts, newer versions are compared with the same older ones: a reward hack does not become
# its own history.

INVALID_CALLS, QUESTIONS = "invalid_tool_calls", "questions"
RATE_CHECKS = frozenset({INVALID_CALLS, QUESTIONS})
MIN_TRAJECTORIES = 32
_MAX_RATE_INCREASE = 0.2
_MAX_VERSIONS = 8  # newest ones that are shown


@dataclass(frozen=True, slots=True)
class RateHistory:
    """What a rate is compared with: the trajectories of older versions, the sum of their shares, and of its squares."""

    trajectories: int
    total: float
    squares: float

    @property
    def mean(self) -> float:
        return self.total / self.trajectories


def check_versions(
    behaviors: Sequence[TrajectoryBehavior], known: Mapping[str, RateHistory] | None = None
) -> tuple[list[Finding], dict[str, RateHistory]]:
    """Return a finding for each rate and version, and the histories of the rates that raise an alarm, by check.

    `known` are the histories that this returned at the last check.
    """
    findings: list[Finding] = []
    alarming: dict[str, RateHistory] = {}
    for check, metric, share, advice in (
        (INVALID_CALLS, "ratchet_invalid_tool_call_ratio", _invalid, _CALLS),
        (QUESTIONS, "ratchet_question_ratio", _questions, _QUESTIONS),
    ):
        rates = _rates(behaviors, share)
        newest = max((version for version in rates if rates[version].trajectories >= MIN_TRAJECTORIES), default=None)
        for version in sorted(rates)[-_MAX_VERSIONS:]:
            reason = None
            if version == newest:
                before = (known or {}).get(check) or _sum([rates[older] for older in rates if older < version])
                if _has_risen(before, rates[version]):
                    alarming[check] = before
                    reason = f"version {version}: {advice.format(rates[version].mean, before.mean)}"
            findings.append(Finding(check, metric, str(version), rates[version].mean, reason))
    return findings, alarming


_CALLS = (
    "{:.0%} of its tool calls name no offered tool or violate its schema, {:.0%} in older versions; look at the calls "
    "(`ratchet trajectories`), let the judge see tool outcomes, or roll the version back"
)
_QUESTIONS = (
    "{:.0%} of its answers ask a question in place of an action, {:.0%} in older versions; check whether the judge "
    "rewards them, or roll the version back"
)


def _invalid(one: TrajectoryBehavior) -> float | None:
    return one.invalid_calls / one.checked_calls if one.checked_calls else None


def _questions(one: TrajectoryBehavior) -> float | None:
    return one.questions / one.answers if one.offered and one.answers else None


def _rates(
    behaviors: Sequence[TrajectoryBehavior], share: Callable[[TrajectoryBehavior], float | None]
) -> dict[int, RateHistory]:
    shares: dict[int, list[float]] = {}
    for one in behaviors:
        if (value := share(one)) is not None:
            shares.setdefault(one.version, []).append(value)
    return {
        version: RateHistory(len(values), math.fsum(values), math.fsum(value * value for value in values))
        for version, values in shares.items()
    }


def _sum(parts: Sequence[RateHistory]) -> RateHistory:
    return RateHistory(
        sum(one.trajectories for one in parts), sum(one.total for one in parts), sum(one.squares for one in parts)
    )


def _has_risen(before: RateHistory, now: RateHistory) -> bool:
    """Whether a rate has risen, by the pooled variance: few trajectories that are all equal prove nothing."""
    if before.trajectories < MIN_TRAJECTORIES or now.mean - before.mean < _MAX_RATE_INCREASE:
        return False
    both = _sum([before, now])
    variance = max(0.0, both.squares / both.trajectories - both.mean**2)
    error = math.sqrt(variance * (1 / before.trajectories + 1 / now.trajectories))
    return now.mean - before.mean >= MIN_SIGMAS * error


# Drift: how the behavior of newer trajectories differs from that of older ones. Pure, on behaviors, oldest first.
#
# Length and reasoning are compared within a task family: a change of the tasks is not drift. Coverage counts over all
# trajectories: nothing is learned about a tool or a file that is never used.

DRIFT_CHECKS = frozenset(
    {"length_drift", "reasoning_drift", "hallucinated_arguments", "tool_coverage", "resource_coverage"}
)
_MIN_OFFERED = 100  # trajectories that could have used a tool or a resource, before it counts as neglected
_MIN_RESOURCES = 5
_MAX_REPORTED, _MAX_REPORTED_CHARS = 5, 80  # names in an alarm
_RECENT_WINDOW = 64  # newest trajectories, compared with the others
_LENGTH_RATIO = 2.0  # change of the sampled tokens per trajectory
_REASONING_RATIO = 3.0  # change of the reasoning tokens per action
_MAX_HALLUCINATION_INCREASE = 0.2


def check_drift(behaviors: Sequence[TrajectoryBehavior], settings: SentinelSettings) -> list[Finding]:
    """Return the findings of every check on behavior; none without a trajectory."""
    if not behaviors:
        return []
    past, recent = behaviors[:-_RECENT_WINDOW], behaviors[-_RECENT_WINDOW:]
    return [
        _ratio_drift("length_drift", "ratchet_trajectory_tokens", _length, past, recent, _LENGTH_RATIO),
        _ratio_drift(
            "reasoning_drift", "ratchet_reasoning_tokens_per_action", _reasoning, past, recent, _REASONING_RATIO
        ),
        Finding("actions", "ratchet_actions_per_trajectory", "", statistics.fmean(one.actions for one in recent)),
        _check_hallucinated(past, recent),
        *check_tool_coverage(behaviors, settings),
        check_resource_coverage(behaviors, settings),
    ]


def check_tool_coverage(behaviors: Sequence[TrajectoryBehavior], settings: SentinelSettings) -> list[Finding]:
    """Return for each tool the share of the trajectories that used it, of those that were offered it."""
    findings = []
    for tool in sorted(frozenset().union(*(one.offered for one in behaviors))):
        offered = [one for one in behaviors if tool in one.offered]
        share = sum(tool in one.used for one in offered) / len(offered)
        reason = None
        if len(offered) >= _MIN_OFFERED and share < settings.min_coverage:
            reason = (
                f"tool {tool!r} was used in {share:.1%} of the last {len(offered)} trajectories that were offered it: "
                "no task needs it, or the policy no longer uses it"
            )
        findings.append(Finding("tool_coverage", "ratchet_tool_use_ratio", tool, share, reason))
    return findings


def check_resource_coverage(behaviors: Sequence[TrajectoryBehavior], settings: SentinelSettings) -> Finding:
    """Return the share of the often shown files and other resources that tool calls named."""
    shown: Counter[str] = Counter()
    opened: Counter[str] = Counter()
    for one in behaviors:
        shown.update(one.shown)
        opened.update(one.opened & one.shown)
    often = [(name, count) for name, count in shown.most_common() if count >= _MIN_OFFERED]
    neglected = [name for name, count in often if opened[name] / count < settings.min_coverage]
    share = (len(often) - len(neglected)) / len(often) if often else 1.0
    reason = None
    if len(often) >= _MIN_RESOURCES and share < settings.min_resource_coverage:
        named = ", ".join(repr(name[:_MAX_REPORTED_CHARS]) for name in neglected[:_MAX_REPORTED])
        named += f" and {len(neglected) - _MAX_REPORTED} more" if len(neglected) > _MAX_REPORTED else ""
        reason = (
            f"{len(neglected)} of {len(often)} files, addresses or ids in the input of {_MIN_OFFERED} or more of "
            f"the last {len(behaviors)} trajectories are named in hardly any tool call ({named}): "
            "no task needs them, or the policy uses only a few; add tasks about them, check what the judge rewards, or "
            "lower min_resource_coverage"
        )
    return Finding("resource_coverage", "ratchet_resource_use_ratio", "", share, reason)


def unnecessary_tool_calls(behaviors: Sequence[TrajectoryBehavior], scores: Mapping[str, float]) -> Finding | None:
    """Return the mean number of tool calls on tasks that an attempt without tools solved as well as the best one."""
    cohorts: dict[str, list[TrajectoryBehavior]] = {}
    for one in behaviors:
        if one.trajectory_id in scores:
            cohorts.setdefault(one.cohort, []).append(one)
    solvable = [members for members in cohorts.values() if _solved_without_tools(members, scores)]
    if not solvable:
        return None
    mean = statistics.fmean(one.tool_calls for members in solvable for one in members)
    return Finding("unnecessary_tool_calls", "ratchet_unnecessary_tool_calls", "", mean)


def _solved_without_tools(members: Sequence[TrajectoryBehavior], scores: Mapping[str, float]) -> bool:
    best = max(scores[one.trajectory_id] for one in members)
    worst = min(scores[one.trajectory_id] for one in members)
    return best > worst and any(not one.tool_calls and scores[one.trajectory_id] == best for one in members)


def _check_hallucinated(past: Sequence[TrajectoryBehavior], recent: Sequence[TrajectoryBehavior]) -> Finding:
    shares = [[one.hallucinated / one.arguments for one in side if one.arguments] for side in (past, recent)]
    now = statistics.fmean(shares[1]) if shares[1] else 0.0
    found = mean_change(shares[0], shares[1])
    reason = None
    if found and found.after - found.before >= _MAX_HALLUCINATION_INCREASE and found.sigmas >= MIN_SIGMAS:
        reason = (
            f"{found.after:.0%} of tool arguments occur nowhere in their context, up from {found.before:.0%}: "
            "the policy hallucinates them; check what the judge rewards"
        )
    return Finding("hallucinated_arguments", "ratchet_hallucinated_argument_ratio", "", now, reason)


def _ratio_drift(
    check: str,
    metric: str,
    measure: Callable[[TrajectoryBehavior], float],
    past: Sequence[TrajectoryBehavior],
    recent: Sequence[TrajectoryBehavior],
    limit: float,
) -> Finding:
    now = statistics.fmean(measure(one) for one in recent)
    found: list[tuple[str, MeanChange]] = []
    for family in {one.family for one in recent}:
        values = [[measure(one) for one in side if one.family == family] for side in (past, recent)]
        moved = mean_change(values[0], values[1])
        if moved and moved.ratio >= limit and abs(moved.sigmas) >= MIN_SIGMAS:
            found.append((family, moved))
    if not found:
        return Finding(check, metric, "", now)
    family, worst = max(found, key=lambda item: abs(item[1].sigmas))
    reason = (
        f"{metric.removeprefix('ratchet_').replace('_', ' ')} went from {worst.before:.0f} to {worst.after:.0f} in "
        f"{family}: does the judge reward length, or did the tasks change?"
    )
    return Finding(check, metric, "", now, reason)


def _length(one: TrajectoryBehavior) -> float:
    return float(one.sampled_tokens)


def _reasoning(one: TrajectoryBehavior) -> float:
    return one.reasoning_tokens / max(1, one.actions)


# Sentinel: feeds the checks from the store, raises and clears their alarms, and pauses training.
#
# Promises: a check reads a bounded amount (the newest tool calls and rounds, and the unread trajectories of the window,
# a few at a time); an alarm clears with the first check that finds its cause gone; paused training has an alarm of its
# own, `training_paused`; the release component decides about blocked releases. Never raises for a finding. Does not
# stop collecting, grouping or judging.

log = logging.getLogger(__name__)

PAUSED = "training_paused"
TOOL_HISTORY = "tool_past"  # kind of the observations that hold what a failing tool is compared with
RATE_HISTORY = "rate_history"  # likewise of a rate that raises an alarm
_CHECKS = frozenset({TOOL_HEALTH, PAUSED, AGREEMENT, *DRIFT_CHECKS, *ROUND_CHECKS, *RATE_CHECKS})
WINDOW = 512  # newest trajectories that are checked
_MAX_TOOL_CALLS = 2_000  # newest ones of the alias
_MAX_READS = 64  # transcripts in one check
_MAX_REASONS = 3  # in one alarm
_ROUNDS_PER_COMMIT = 4  # rounds read for each committed one


HistoryT = TypeVar("HistoryT", ToolHistory, RateHistory)


class Sentinel:
    """Checks one alias."""

    def __init__(
        self,
        settings: SentinelSettings,
        store: Store,
        alias: str,
        metrics: TrainerMetrics | None = None,
        second: SecondJudge | None = None,
    ) -> None:
        self._settings = settings
        self._store = store
        self._alias = alias
        self._second = second
        self._metrics = metrics or TrainerMetrics(alias)
        self._checked_at: float | None = None
        self._behaviors: dict[str, TrajectoryBehavior] = {}
        self._damaged: set[str] = set()  # trajectories of the window that cannot be read
        self._behind = False  # there is more to read than one check reads
        self._complete = False  # the window has been read once since the start
        self._histories: dict[str, Any] = {}  # by kind and name: of what raises an alarm
        self._raised: set[str] = set()  # checks whose alarm is active
        self.findings: tuple[Finding, ...] = ()
        self.pauses_training = False

    def check(self, now: float) -> bool:
        """Run the checks if they are due; return whether training should pause."""
        if self._checked_at is None or now - self._checked_at >= self._settings.interval_seconds:
            self._checked_at = now
            self.findings = tuple(self._run_checks())
            self._update_alarms(self.findings)
            self._metrics.findings(self.findings, paused=self.pauses_training)
        elif self._behind:  # read some more with each step
            self._newest_behaviors()
        return self.pauses_training

    def note(self, transcript: Transcript) -> None:
        """Take a live trajectory that was just read, so that the next check need not read it."""
        if transcript.trajectory.purpose == "live" and len(self._behaviors) < 2 * WINDOW:
            self._behaviors[transcript.trajectory.id] = read_behavior(transcript)

    @property
    def is_behind(self) -> bool:
        """Whether there is more to read than one check reads."""
        return self._behind

    def blocking_findings(self) -> list[Finding]:
        """Return the findings of the last check after which a person should approve a version."""
        return [found for found in self.findings if found.blocks_release] if self._settings.block_release else []

    def _run_checks(self) -> list[Finding]:
        rounds = self._store.rounds.page(self._alias, limit=_ROUNDS_PER_COMMIT * MAX_ROUNDS)
        self._metrics.rounds(rounds)
        behaviors = self._newest_behaviors()
        if not self._complete:  # a part of the window shows neither the start nor the end of a change
            behaviors = []
        unnecessary = unnecessary_tool_calls(behaviors, self._scores([one.trajectory_id for one in behaviors]))
        second = self._second
        return [
            *self._check_tool_health(),
            *check_drift(behaviors, self._settings),
            *(self._check_rates(behaviors) if behaviors else []),
            *check_rounds(rounds),
            *([unnecessary] if unnecessary else []),
            *(agreement(second.paired_judgements(), second.name) if second else []),
        ]

    def _check_tool_health(self) -> list[Finding]:
        newest = self._store.tools.newest_answered(self._alias, _MAX_TOOL_CALLS)

        def check(known: Mapping[str, ToolHistory]) -> tuple[list[Finding], dict[str, ToolHistory]]:
            findings, histories = check_tool_health(newest, self._settings, known)
            failing = {found.subject for found in findings if found.reason}
            return findings, {tool: history for tool, history in histories.items() if tool in failing}

        return self._with_histories(TOOL_HISTORY, ToolHistory, check)

    def _check_rates(self, behaviors: Sequence[TrajectoryBehavior]) -> list[Finding]:
        return self._with_histories(RATE_HISTORY, RateHistory, lambda known: check_versions(behaviors, known))

    def _with_histories(
        self,
        kind: str,
        record: type[HistoryT],
        check: Callable[[Mapping[str, HistoryT]], tuple[list[Finding], dict[str, HistoryT]]],
    ) -> list[Finding]:
        """Run a check with what it is compared with while it raises an alarm, which the store keeps over a restart."""
        if kind not in self._histories:
            stored = self._store.observations.latest(self._alias, kind)
            self._histories[kind] = {name: record(**one.content) for name, one in stored.items() if one.content}
        known = self._histories[kind]
        findings, histories = check(known)
        self._histories[kind] = histories
        for name in sorted(known.keys() ^ histories.keys()):
            content = asdict(histories[name]) if name in histories else {}
            self._store.observations.add(self._alias, kind, name, content)
        return findings

    def _scores(self, names: Sequence[str]) -> dict[str, float]:
        verdicts = self._store.groups.verdicts(names) if names else {}
        return {name: verdict.score for name, verdict in verdicts.items() if verdict.score is not None}

    def _newest_behaviors(self) -> list[TrajectoryBehavior]:
        """Return the behaviors of the window that have been read, oldest first; reads some more."""
        page = self._store.trajectories.page(limit=WINDOW, chosen=TrajectoryFilter(alias=self._alias))
        ended = [one for one in page if one.purpose == "live" and one.state is not TrajectoryState.OPEN]
        known = {one.id: self._behaviors[one.id] for one in ended if one.id in self._behaviors}
        self._damaged &= {one.id for one in ended}
        unread = [one for one in ended if one.id not in known and one.id not in self._damaged]
        self._behind = len(unread) > _MAX_READS
        self._complete = self._complete or not self._behind
        names = [one.id for one in unread[:_MAX_READS]]
        for read in self._store.trajectories.readable(names):
            known[read.trajectory.id] = read_behavior(read)
        self._damaged |= {*names} - known.keys()
        self._behaviors = known
        return [known[one.id] for one in reversed(ended) if one.id in known]

    def _update_alarms(self, findings: Sequence[Finding]) -> None:
        """Raise the alarms of the findings, and clear those whose cause is gone."""
        reasons: dict[str, list[str]] = {}
        for found in findings:
            if found.reason:
                reasons.setdefault(found.check, []).append(found.reason)
        pausing = [found.reason for found in findings if found.blocks_training and found.reason]
        pausing = pausing if self._settings.pause_training else []
        if pausing:
            reasons[PAUSED] = [f"training is paused, collecting and judging continue: {_joined(pausing)}"]
        for check, why in sorted(reasons.items()):
            self._store.alarms.raise_(f"{check}:{self._alias}", _joined(why))
            if check not in self._raised:
                log.warning("event=alarm name=%s:%s reason=%r", check, self._alias, _joined(why))
        unchecked = frozenset() if self._complete else DRIFT_CHECKS | RATE_CHECKS
        self._store.alarms.clear(*(f"{check}:{self._alias}" for check in _CHECKS - reasons.keys() - unchecked))
        self._raised = set(reasons)
        if bool(pausing) != self.pauses_training:
            log.warning("event=%s reason=%r", "training_paused" if pausing else "training_resumed", _joined(pausing))
        self.pauses_training = bool(pausing)


def _joined(reasons: Sequence[str]) -> str:
    more = f"; and {len(reasons) - _MAX_REASONS} more" if len(reasons) > _MAX_REASONS else ""
    return "; ".join(reasons[:_MAX_REASONS]) + more
