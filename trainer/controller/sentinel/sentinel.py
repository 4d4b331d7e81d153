"""The watcher: feeds the checks from the store, raises and clears their alarms, and says whether training should wait.

Promises: a look costs a bounded amount of reading (the newest tool calls and rounds, and of the window's trajectories
those that it has not read before, a few at a time); an alarm clears at the first look that finds its cause gone; what
holds training is an alarm of its own, `training_paused`; what holds promotion is the gate's. Never raises for what it
finds. Does not stop collecting, grouping or judging.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict

from ratchet.store.calls.trajectory_filter import TrajectoryFilter
from ratchet.store.errors import RecordNotFound
from ratchet.store.records import Trajectory
from ratchet.store.states import TrajectoryState
from ratchet.store.store import Store
from ratchet.trainer.controller.judging.judge_agreement import CHECK as AGREEMENT
from ratchet.trainer.controller.judging.judge_agreement import agreement
from ratchet.trainer.controller.judging.second_judge import SecondJudge
from ratchet.trainer.controller.sentinel.behavior import TrajectoryBehavior, conduct
from ratchet.trainer.controller.sentinel.drift import CHECKS as DRIFT
from ratchet.trainer.controller.sentinel.drift import drift, unnecessary_tool_calls
from ratchet.trainer.controller.sentinel.round_checks import CHECKS as LAST_ROUNDS
from ratchet.trainer.controller.sentinel.round_checks import LOOKED_AT, last_rounds
from ratchet.trainer.controller.sentinel.tool_health import CHECK, ToolHistory, tool_health
from ratchet.trainer.observability.finding import Finding
from ratchet.trainer.observability.metrics import Metrics
from ratchet.trainer.settings.sentinel_settings import SentinelSettings

log = logging.getLogger(__name__)

HELD = "training_paused"
TOOL_PAST = "tool_past"  # kind of the observations that say what a sick tool is compared with
_OWN = frozenset({CHECK, HELD, AGREEMENT, *DRIFT, *LAST_ROUNDS})
_TOOL_CALLS = 2_000  # newest ones of the alias
_READ_AT_ONCE = 64  # transcripts in one look
_TOLD = 3  # subjects that an alarm names
_ABANDONED = 4  # rounds read for each committed one that is looked at


class Sentinel:
    """Watches one alias."""

    def __init__(
        self,
        settings: SentinelSettings,
        store: Store,
        alias: str,
        metrics: Metrics | None = None,
        second: SecondJudge | None = None,
    ) -> None:
        self._settings = settings
        self._store = store
        self._alias = alias
        self._second = second
        self._metrics = metrics or Metrics(alias)
        self._looked_at: float | None = None
        self._conducts: dict[str, TrajectoryBehavior] = {}
        self._behind = False  # there is more to read than one look reads
        self._whole = False  # the window has been read once since the start
        self._pasts: dict[str, ToolHistory] | None = None  # of tools that are sick; None: not known yet
        self._standing: set[str] | None = None  # checks whose alarm stands; None: not known yet
        self.findings: tuple[Finding, ...] = ()
        self.holding = False

    def look(self, now: float) -> bool:
        """Look where it is time to; return whether training should wait."""
        if self._looked_at is None or now - self._looked_at >= self._settings.interval_seconds:
            self._looked_at = now
            self.findings = tuple(self._look())
            self._tell(self.findings)
            self._metrics.findings(self.findings, paused=self.holding)
        elif self._behind:  # at each turn some more
            self._newest_behaviors()
        return self.holding

    def doubts(self) -> list[Finding]:
        """Return what of the last look says that a person should see a version before it is promoted."""
        return [found for found in self.findings if found.doubts] if self._settings.block_release else []

    def _look(self) -> list[Finding]:
        rounds = self._store.rounds.page(self._alias, limit=_ABANDONED * LOOKED_AT)
        self._metrics.rounds(rounds)
        conducts = self._newest_behaviors()
        if not self._whole:  # what is not known yet tells of no change, and of the end of none
            conducts = []
        needless = unnecessary_tool_calls(conducts, self._scores([one.trajectory_id for one in conducts]))
        return [
            *self._tool_health(),
            *drift(conducts, self._settings),
            *last_rounds(rounds, self._settings),
            *([needless] if needless else []),
            *(agreement(self._second.heard(), self._second.name, self._settings) if self._second else []),
        ]

    def _tool_health(self) -> list[Finding]:
        newest = self._store.tools.newest_answered(self._alias, _TOOL_CALLS)
        known = self._load_tool_history() if self._pasts is None else self._pasts
        findings, pasts = tool_health(newest, self._settings, known)
        sick = {found.subject for found in findings if found.reason}
        self._pasts = {tool: past for tool, past in pasts.items() if tool in sick}
        for tool in sorted(known.keys() ^ self._pasts.keys()):
            past = self._pasts.get(tool)
            self._store.observations.add(self._alias, TOOL_PAST, tool, asdict(past) if past else {})
        return findings

    def _load_tool_history(self) -> dict[str, ToolHistory]:
        """Return the pasts of the tools that were sick when the trainer ended."""
        told = self._store.observations.latest(self._alias, TOOL_PAST)
        return {tool: ToolHistory(**noted.content) for tool, noted in told.items() if noted.content}

    def _scores(self, names: Sequence[str]) -> dict[str, float]:
        verdicts = self._store.groups.verdicts(names) if names else {}
        return {name: verdict.score for name, verdict in verdicts.items() if verdict.score is not None}

    def _newest_behaviors(self) -> list[TrajectoryBehavior]:
        """Return the conducts of the window as far as they were read, oldest first; reads some more."""
        runs = self._store.trajectories.page(limit=self._settings.window, chosen=TrajectoryFilter(alias=self._alias))
        ended = [run for run in runs if run.purpose == "live" and run.state is not TrajectoryState.OPEN]
        known = {run.id: self._conducts[run.id] for run in ended if run.id in self._conducts}
        unread = [run for run in ended if run.id not in known]
        self._behind = len(unread) > _READ_AT_ONCE
        self._whole = self._whole or not self._behind
        for run in unread[:_READ_AT_ONCE]:
            read = self._read(run)
            if read is not None:
                known[run.id] = read
        self._conducts = known
        return [known[run.id] for run in reversed(ended) if run.id in known]

    def _read(self, run: Trajectory) -> TrajectoryBehavior | None:
        try:
            return conduct(self._store.trajectories.read(run.id))
        except RecordNotFound:  # deleted in between
            return None

    def _tell(self, findings: Sequence[Finding]) -> None:
        """Raise the alarms of what was found, and clear those whose cause is gone."""
        wrong: dict[str, list[str]] = {}
        for found in findings:
            if found.reason:
                wrong.setdefault(found.check, []).append(found.reason)
        holds = (
            [found.reason for found in findings if found.holds and found.reason]
            if self._settings.pause_training
            else []
        )
        if holds:
            wrong[HELD] = [f"no step is taken, collecting and judging go on: {_joined(holds)}"]
        standing = self._left_standing() if self._standing is None else self._standing
        unseen = set() if self._whole else standing & DRIFT
        for check in sorted({found.check for found in findings} | wrong.keys() | (standing - unseen)):
            self._alarm(check, wrong.get(check, []), check in standing)
        if bool(holds) != self.holding:
            log.warning("event=%s reason=%r", "training_paused" if holds else "training_resumed", _joined(holds))
        self.holding = bool(holds)
        self._standing = set(wrong) | unseen

    def _left_standing(self) -> set[str]:
        """Return the checks whose alarm an earlier trainer left standing."""
        names = {alarm.name for alarm in self._store.alarms.active()}
        return {check for check in _OWN if f"{check}:{self._alias}" in names}

    def _alarm(self, check: str, reasons: Sequence[str], stands: bool) -> None:
        name = f"{check}:{self._alias}"
        if reasons:
            self._store.alarms.raise_(name, _joined(reasons))
            if not stands:
                log.warning("event=alarm name=%s reason=%r", name, _joined(reasons))
        elif stands:
            self._store.alarms.clear(name)


def _joined(reasons: Sequence[str]) -> str:
    more = f"; and {len(reasons) - _TOLD} more" if len(reasons) > _TOLD else ""
    return "; ".join(reasons[:_TOLD]) + more
