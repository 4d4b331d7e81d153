"""Sentinel: feeds the checks from the store, raises and clears their alarms, and pauses training.

Promises: a check reads a bounded amount (the newest tool calls and rounds, and the unread trajectories of the window, a
few at a time); an alarm clears with the first check that finds its cause gone; paused training has an alarm of its own,
`training_paused`; the release component decides about blocked releases. Never raises for a finding. Does not stop
collecting, grouping or judging.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict

from ratchet.store.calls.trajectory_filter import TrajectoryFilter
from ratchet.store.records import Transcript
from ratchet.store.states import TrajectoryState
from ratchet.store.store import Store
from ratchet.trainer.controller.judging.rejudging import KIND as AGREEMENT
from ratchet.trainer.controller.judging.rejudging import SecondJudge, agreement
from ratchet.trainer.controller.sentinel.behavior import TrajectoryBehavior, read_behavior
from ratchet.trainer.controller.sentinel.round_checks import (
    DRIFT_CHECKS,
    MAX_ROUNDS,
    RATE_CHECKS,
    ROUND_CHECKS,
    RateHistory,
    check_drift,
    check_rounds,
    check_versions,
    unnecessary_tool_calls,
)
from ratchet.trainer.controller.sentinel.tool_health import CHECK as TOOL_HEALTH
from ratchet.trainer.controller.sentinel.tool_health import ToolHistory, check_tool_health
from ratchet.trainer.observability.finding import Finding
from ratchet.trainer.observability.metrics import TrainerMetrics
from ratchet.trainer.settings.trainer_sections import SentinelSettings

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
        self._tool_histories: dict[str, ToolHistory] | None = None  # of failing tools; None: not read yet
        self._rate_histories: dict[str, RateHistory] | None = None  # of rates that raise an alarm; None: not read yet
        self._active: set[str] | None = None  # checks whose alarm is active; None: not read yet
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
        known = self._load_tool_histories() if self._tool_histories is None else self._tool_histories
        findings, histories = check_tool_health(newest, self._settings, known)
        failing = {found.subject for found in findings if found.reason}
        self._tool_histories = {tool: history for tool, history in histories.items() if tool in failing}
        for tool in sorted(known.keys() ^ self._tool_histories.keys()):
            history = self._tool_histories.get(tool)
            self._store.observations.add(self._alias, TOOL_HISTORY, tool, asdict(history) if history else {})
        return findings

    def _check_rates(self, behaviors: Sequence[TrajectoryBehavior]) -> list[Finding]:
        noted = self._store.observations.latest(self._alias, RATE_HISTORY) if self._rate_histories is None else {}
        stored = {check: RateHistory(**one.content) for check, one in noted.items() if one.content}
        known = stored if self._rate_histories is None else self._rate_histories
        findings, self._rate_histories = check_versions(behaviors, known)
        for check in sorted(known.keys() ^ self._rate_histories.keys()):
            history = self._rate_histories.get(check)
            self._store.observations.add(self._alias, RATE_HISTORY, check, asdict(history) if history else {})
        return findings

    def _load_tool_histories(self) -> dict[str, ToolHistory]:
        """Return the histories of the tools that were failing when the trainer stopped."""
        noted = self._store.observations.latest(self._alias, TOOL_HISTORY)
        return {tool: ToolHistory(**one.content) for tool, one in noted.items() if one.content}

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
        active = self._active_alarms() if self._active is None else self._active
        unchecked = set() if self._complete else active & (DRIFT_CHECKS | RATE_CHECKS)
        for check in sorted({found.check for found in findings} | reasons.keys() | (active - unchecked)):
            self._set_alarm(check, reasons.get(check, []), check in active)
        if bool(pausing) != self.pauses_training:
            log.warning("event=%s reason=%r", "training_paused" if pausing else "training_resumed", _joined(pausing))
        self.pauses_training = bool(pausing)
        self._active = set(reasons) | unchecked

    def _active_alarms(self) -> set[str]:
        """Return the checks whose alarm an earlier trainer left active."""
        names = {alarm.name for alarm in self._store.alarms.active()}
        return {check for check in _CHECKS if f"{check}:{self._alias}" in names}

    def _set_alarm(self, check: str, reasons: Sequence[str], active: bool) -> None:
        name = f"{check}:{self._alias}"
        if reasons:
            self._store.alarms.raise_(name, _joined(reasons))
            if not active:
                log.warning("event=alarm name=%s reason=%r", name, _joined(reasons))
        elif active:
            self._store.alarms.clear(name)


def _joined(reasons: Sequence[str]) -> str:
    more = f"; and {len(reasons) - _MAX_REASONS} more" if len(reasons) > _MAX_REASONS else ""
    return "; ".join(reasons[:_MAX_REASONS]) + more
