"""The release controller: moves a version through its ramp, keeps what must be kept, and may ask a person."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from statistics import fmean

from ratchet.store.coordination import PROXY_TIMEOUT_SECONDS
from ratchet.store.errors import InvalidTransition
from ratchet.store.policies.serving import ServingVersions, shares_in_force
from ratchet.store.reasons import DropReason
from ratchet.store.records import BASE_VERSION, Decision, PastScore, Policy
from ratchet.store.states import SERVING, PolicyAction, PolicyState, TuningKind, TuningState
from ratchet.store.store import Store
from ratchet.trainer.judges.judgement import Judge
from ratchet.trainer.observability.metrics import TrainerMetrics
from ratchet.trainer.release.candidates import is_trained, version_name
from ratchet.trainer.release.evaluation import SecondOpinionRunner, mean_difference
from ratchet.trainer.release.policy import (
    ReleaseAction,
    ReleaseDecision,
    ReleaseRules,
    ReleaseState,
    decide,
    is_cause_unresolved,
    shares_of,
)
from ratchet.trainer.release.publisher import (
    GetBlockingFindings,
    blocking_reason,
    clear_approval_alarm,
    findings_evidence,
    no_blocking_findings,
    require_approval,
)
from ratchet.trainer.release.release_evidence import OutcomeCounter, decision_evidence, describe_release
from ratchet.trainer.settings.trainer_sections import ReleaseSettings
from ratchet.trainer.statistics import MeanDifference

# What must hold before a ramp ends, besides the evidence: else a person decides.
#
# A judge that is fooled sees a gain, and no comparison of means finds it out. So a gain above `max_gain`, a second
# judge that disagrees, or a finding of the sentinel that the judges disagree holds the version: its ramp goes on, the
# anchor stays, and a rollback is still possible.

log = logging.getLogger(__name__)

_UNKNOWN = MeanDifference(0.0, float("-inf"), float("inf"), 0)


# Retention: the versions whose checkpoint folder stays, and those whose optimizer state stays.
#
# Kept: versions that serve or may serve soon, versions that a trajectory is pinned to, the version that training
# continues from, the newest ones and the best ones. The optimizer state, most of a folder's bytes, stays with the
# newest and the best ones only. All other folders are deleted; their rows in the store stay.

_KEPT = (*SERVING, PolicyState.CANDIDATE)
_SECOND_JUDGE_PAIRS = 20  # of a trajectory of the ramp and a live one
_MIN_SCORES = 16  # of a version that is compared with others
_ROLLOUT_TIMEOUT = 3600.0  # seconds that a version is kept for a planned rollout that has not ended


@dataclass(frozen=True, slots=True)
class Retention:
    """Version numbers: those whose folder stays, and those of them whose optimizer state stays."""

    folders: Set[int]
    states: Set[int]


def versions_in_use(store: Store, alias: str, now: float) -> set[int]:
    """Return the versions that a proxy has trajectories pinned to, or that planned rollouts of the tuner need."""
    proxies = store.proxy_instances.running(alias, now - PROXY_TIMEOUT_SECONDS)
    pins = [name.rpartition("@") for proxy in proxies for name, count in proxy.pinned_trajectories.items() if count]
    pinned = {int(version) for name, _, version in pins if name == alias}
    return pinned | store.rollouts.awaited_versions(alias, now - _ROLLOUT_TIMEOUT)


def retained(
    policies: Sequence[Policy], *, pinned: Collection[int], best: Sequence[int], newest: int, states: int
) -> Retention:
    """Return what stays: `newest` versions with their folder, `states` of them with their state; `best`, best first."""
    versions = sorted((policy.version for policy in policies if policy.version != BASE_VERSION), reverse=True)
    serving = {policy.version for policy in policies if policy.state in _KEPT}
    # Training continues from the newest version that is not rejected: it may be unproven, or the live one after a
    # rollback.
    trained = [policy.version for policy in policies if policy.state is not PolicyState.REJECTED and policy.round_id]
    with_state = {*versions[:states], *best[:states], *serving, *trained[-1:]}
    with_folder = {*versions[:newest], *serving, *pinned, *with_state}
    return Retention(folders=_sharing(policies, with_folder), states=_sharing(policies, with_state))


def _sharing(policies: Sequence[Policy], versions: Set[int]) -> Set[int]:
    """Return these versions and those that share a folder with one, that is, differ by their prompt only."""
    folders = {policy.adapter for policy in policies if policy.version in versions and policy.adapter}
    return {*versions, *(policy.version for policy in policies if policy.adapter in folders)}


def best_first(scores: Sequence[PastScore]) -> list[int]:
    """Return the trained versions by the mean score of their trajectories, without those that have too few scores.

    Not for a judge that only ranks: its means do not compare versions.
    """
    by_version: dict[int, list[float]] = {}
    for scored in scores:
        if scored.version != BASE_VERSION:
            by_version.setdefault(scored.version, []).append(scored.score)
    means: Mapping[int, float] = {
        version: fmean(values) for version, values in by_version.items() if len(values) >= _MIN_SCORES
    }
    return sorted(means, key=lambda version: (means[version], version), reverse=True)


# The release controller: carries out the release policy of one alias.
#
# Reads which versions serve and what their trajectories came to, asks `policy.py` for the next decision, and has the
# store carry it out with its evidence. Promises: no decision is made on evidence that is not current; a rollback needs
# no person, and nothing waits for one but the end of a ramp and the move of the anchor; a restart goes on from the
# store. Training never waits for it, except after two rollbacks among ten releases. Never blocks.
#
# The publisher begins the ramps: it proves a candidate first. Under the policy `immediate`, and while a run of `tune
# weights` uses the alias, proven versions become live at once and nothing is decided here.

DECIDED_BY = "release"
_CHECK_SECONDS = 1.0
_IDLE_CHECK_SECONDS = 10.0  # while no version is in its ramp
_RECORD_SECONDS = 10.0
_IDLE_RECORD_SECONDS = 30.0
_MAX_DECISIONS = 8  # in one check
_HISTORY = 1000  # decisions


class ReleaseController:
    """Decides about the versions of one alias that serve.

    `round_size`: trajectories of a round. `relative`: the judge's scores only rank the members of a group. `second` is
    asked before the end of a ramp; `blocking_findings` returns the sentinel's findings that block it.
    """

    def __init__(
        self,
        store: Store,
        alias: str,
        settings: ReleaseSettings,
        judge_version: str,
        *,
        round_size: int,
        relative: bool = False,
        second: Judge | None = None,
        blocking_findings: GetBlockingFindings = no_blocking_findings,
        metrics: TrainerMetrics | None = None,
    ) -> None:
        self._store = store
        self._alias = alias
        self._settings = settings
        self._rules = ReleaseRules.of(settings)
        self._round_size = round_size
        self._judge_version = judge_version
        self._blocking_findings = blocking_findings
        self._second = (  # asked in a thread of its own
            SecondOpinionRunner(second, _SECOND_JUDGE_PAIRS, store.trajectories.read) if second else None
        )
        self._metrics = metrics or TrainerMetrics(alias)
        self._counter = OutcomeCounter(
            store, alias, judge_version, relative=relative, deadline_seconds=settings.deadline_seconds
        )
        self._counted_for: tuple[int, tuple[int, ...]] | None = None  # anchor and releases of the evidence
        self._checked_at = self._recorded_at = 0.0
        self._checked_versions: tuple[int | None, ...] = ()
        self._awaits_approval = True  # or this is not known yet
        self.has_candidate = True  # at the last check, or this is not known yet
        self.is_publishing_blocked = True  # a version is in its ramp, held or pinned, or this is not known yet
        self.pauses_training = False  # the last rollbacks point to a cause that stays
        self.is_immediate = settings.policy == "immediate"

    def close(self) -> None:
        """Close the second judge."""
        if self._second is not None:
            self._second.close()

    def check(self, now: float) -> bool:
        """Decide on the versions that serve; return whether something was decided."""
        policies = self._store.policies.all(self._alias)
        serving = self._store.policies.serving_of(self._alias)
        self.has_candidate = any(policy.state is PolicyState.CANDIDATE for policy in policies)
        awaiting = self._store.policies.awaiting_approval(self._alias) if self.has_candidate or serving.ramp else None
        if self._awaits_approval and awaiting is None:
            clear_approval_alarm(self._store, self._alias)
        self._awaits_approval = awaiting is not None
        pinned = serving.live is not None and serving.live.pinned_at is not None
        self.is_publishing_blocked = (
            awaiting is not None or pinned or (serving.ramp is not None and not self._ends_at_once(serving.ramp))
        )
        every = _CHECK_SECONDS if serving.ramp is not None else _IDLE_CHECK_SECONDS
        versions = tuple(policy.version if policy else None for policy in serving)
        unchanged = versions == self._checked_versions  # a person may have decided
        if serving.live is None or (unchanged and 0.0 <= now - self._checked_at < every):
            return False
        self._checked_at, self._checked_versions = now, versions
        self.is_immediate = self._settings.policy == "immediate" or self._is_tuning()
        decided = False
        if not pinned:
            try:
                decided = self._decide(policies, serving, now)
            except InvalidTransition as overtaken:  # a person decided first
                log.info("event=release_decision_overtaken reason=%r", str(overtaken))
        if decided or any(policy.state is PolicyState.REJECTED for policy in policies):
            self._drop_rejected()
        if decided:
            self._checked_at = 0.0
        return decided

    def ramp_share(self, candidate: Policy) -> float | None:
        """Return the share of new trajectories with which a candidate begins its ramp; None: it is live at once."""
        serving = self._store.policies.serving_of(self._alias)
        if self.is_immediate or serving.live is None or serving.anchor is None:
            return None
        live = serving.live.version
        harm = self._counter.evidence.harm(live)
        return shares_of(serving.anchor.version, live, candidate.version, harm, self._rules)[candidate.version]

    def _decide(self, policies: Sequence[Policy], serving: ServingVersions, now: float) -> bool:
        if serving.ramp is not None and self._ends_at_once(serving.ramp):
            reason = "versions are released without a guard now"
            self._store.policies.promote(self._alias, serving.ramp.version, {}, by=DECIDED_BY, reason=reason)
            return True
        history = self._store.decisions.decisions_of(self._alias, limit=_HISTORY)
        self._check_cause(policies, history)
        self._follow(policies, serving, history, now)
        shipped = self._store.proxy_instances.shipped_until(self._alias, now, since=now - PROXY_TIMEOUT_SECONDS)
        self._counter.read(shipped)
        if not self._counter.is_current:
            return False
        decision = decide(self._state(serving, history), self._rules)
        self._record(serving, decision, now)
        if decision.action in (ReleaseAction.WAIT, ReleaseAction.BEGIN_RAMP):
            return False
        if decision.action is ReleaseAction.END_RAMP and serving.ramp is not None and serving.live is not None:
            checked = self._check_promotion(serving.ramp, serving.live, _served_since(serving, history))
            if checked is not None:
                return checked
        self._apply(decision, serving)
        return True

    def _check_promotion(self, ramp: Policy, live: Policy, since: float) -> bool | None:
        """Hold the version if a check fails; return True then, False while the second judge works, None to go on."""
        evidence = self._counter.evidence
        findings = self._blocking_findings()
        recorded = decision_evidence(evidence, self._judge_version) | findings_evidence(findings)
        sums = evidence.ramp_differences.get(ramp.version)
        gain = (mean_difference(sums) if sums is not None else None) or _UNKNOWN
        reasons = [self._gain_reason(gain), blocking_reason(findings)]
        if self._second is not None:
            scores = self._store.groups.rewards
            mine = scores(self._alias, self._judge_version, ramp.version)
            others = scores(self._alias, self._judge_version, live.version, since)
            opinion = self._second.opinion_on(ramp.version, mine, others)
            if opinion is None:
                return False
            recorded |= opinion.evidence()
            reasons.insert(1, opinion.blocking_reason(gain))
        if reason := "; ".join(filter(None, reasons)):
            require_approval(self._store, ramp, reason, recorded, by="release")
            return True
        return None

    def _gain_reason(self, gain: MeanDifference) -> str | None:
        if self._settings.max_gain is None or gain.value <= self._settings.max_gain:
            return None
        interval = f"{gain.low:+.3f} to {gain.high:+.3f}, at all times 95%"
        return f"the gain exceeds max_gain {self._settings.max_gain:g}: {gain.value:+.3f} ({interval})"

    def _follow(
        self, policies: Sequence[Policy], serving: ServingVersions, history: Sequence[Decision], now: float
    ) -> None:
        assert serving.anchor is not None
        assert serving.live is not None
        newest = serving.ramp or serving.live
        rejected = {policy.version for policy in policies if policy.state is PolicyState.REJECTED}
        anchor = serving.anchor.version
        releases = {
            decision.version: decision.decided_at  # the first one, which comes last
            for decision in history
            if decision.action in (PolicyAction.RAMP, PolicyAction.PROMOTE)
            and anchor < decision.version <= newest.version
            and decision.version not in rejected
        }
        key = anchor, tuple(sorted(releases))
        if self._counted_for == key:
            return
        if self._counted_for == (anchor, key[1][:-1]) and key[1]:
            self._counter.begin_release(key[1][-1])
        else:
            self._counter.begin(anchor, releases, frozenset(rejected), now)
        self._counted_for = key

    def _state(self, serving: ServingVersions, history: Sequence[Decision]) -> ReleaseState:
        assert serving.anchor is not None
        assert serving.live is not None
        evidence, ramp = self._counter.evidence, serving.ramp
        return ReleaseState(
            anchor=serving.anchor.version,
            live=serving.live.version,
            ramp=ramp.version if ramp is not None else None,
            ramp_counted=evidence.counted_in_ramp.get(ramp.version, 0) if ramp is not None else 0,
            round_size=self._round_size,
            harm={release: evidence.harm(release) for release in evidence.releases},
            anchor_gain=evidence.anchor_gain,
            shares=shares_in_force(filter(None, serving)),
            held=_hold_reason(ramp, history),
        )

    def _apply(self, decision: ReleaseDecision, serving: ServingVersions) -> None:
        assert decision.version is not None
        policies, alias, reason = self._store.policies, self._alias, decision.reason
        evidence = decision_evidence(self._counter.evidence, self._judge_version)
        match decision.action:
            case ReleaseAction.ROLLBACK:
                assert decision.target is not None
                rejected = policies.roll_back(alias, decision.target, evidence, by=DECIDED_BY, reason=reason)
                clear_approval_alarm(self._store, alias)
                names = ",".join(map(version_name, rejected))
                log.warning("event=policy_rolled_back policies=%s to=%s reason=%r", names, decision.target, reason)
            case ReleaseAction.MOVE_ANCHOR:
                policies.move_anchor(alias, evidence, by=DECIDED_BY, reason=reason)
                log.info("event=anchor_moved alias=%s to=%d reason=%r", alias, decision.version, reason)
            case ReleaseAction.END_RAMP:
                assert serving.anchor is not None
                harm = self._counter.evidence.harm(decision.version)
                shares = shares_of(serving.anchor.version, decision.version, None, harm, self._rules)
                policies.promote(
                    alias, decision.version, evidence, only_from=PolicyState.RAMP, by=DECIDED_BY, reason=reason,
                    holdback=shares[serving.anchor.version],
                )  # fmt: skip
                log.info("event=policy_promoted policy=%s@%d reason=%r", alias, decision.version, reason)
            case ReleaseAction.CHANGE_SHARES:
                assert decision.shares is not None
                for policy in filter(None, (serving.holdback, serving.ramp)):
                    share = decision.shares[policy.version]
                    policies.set_share(alias, policy.version, share, evidence, by=DECIDED_BY, reason=reason)

    def _ends_at_once(self, ramp: Policy) -> bool:
        """Whether the ramp of a version needs no evidence. A prompt on trial has one under any policy."""
        return self.is_immediate and is_trained(ramp)

    def _check_cause(self, policies: Sequence[Policy], history: Sequence[Decision]) -> None:
        """Stop training if two of the last ten releases were rolled back, until a person decides or the judge changes.

        A fooled judge or a bad reward makes training repeat the step.
        """
        recent: dict[int, bool] = {}
        reasons: set[str] = set()  # one rollback may reject several versions
        for decision in history:  # newest first
            if decision.decided_by not in _AUTOMATIC:
                break
            if decision.action is PolicyAction.RAMP:
                recent.setdefault(decision.version, False)
            elif decision.action is PolicyAction.ROLLBACK and decision.reason not in reasons:
                reasons.add(decision.reason)
                recent[decision.version] = decision.evidence.get("judge_version") == self._judge_version
        ramped = {decision.version for decision in history if decision.action is PolicyAction.RAMP}
        unresolved = is_cause_unresolved([recent[version] for version in sorted(recent.keys() & ramped)])
        if unresolved == self.pauses_training:
            return
        self.pauses_training = unresolved
        alarm = f"repeated_rollbacks:{self._alias}"
        if not unresolved:
            self._store.alarms.clear(alarm)
            return
        reason = (
            "two of the last ten releases were rolled back, so training is paused: a judge that is fooled, or a wrong "
            f"reward, makes it repeat the step. `ratchet policies show {self._alias}` has the evidence; a changed "
            f"judge, or `ratchet policies pin {self._alias}` and `unpin {self._alias}`, let training go on"
        )
        self._store.alarms.raise_(alarm, reason)
        log.error("event=training_paused alias=%s reason=%r", self._alias, reason)

    def _record(self, serving: ServingVersions, decision: ReleaseDecision, now: float) -> None:
        """Show what is known, in metrics and, now and then, in the store."""
        evidence = self._counter.evidence
        newest = serving.ramp or serving.live
        assert newest is not None
        assert serving.live is not None
        counted = evidence.counted_in_ramp.get(newest.version, 0)
        self._metrics.release(evidence.harm(newest.version), counted, mean_difference(evidence.anchor_difference))
        every = _RECORD_SECONDS if serving.ramp is not None else _IDLE_RECORD_SECONDS
        if decision.action is ReleaseAction.WAIT and 0.0 <= now - self._recorded_at < every:
            return
        self._recorded_at = now
        per_day = self._counter.per_day(now)
        for policy in filter(None, (serving.live, serving.ramp)):
            known = describe_release(policy, serving, evidence, self._rules, self._round_size, per_day)
            self._store.releases.record_evidence(self._alias, policy.version, known | {"status": decision.reason})

    def _is_tuning(self) -> bool:
        """Whether a run of the tuner trains this alias: its rollouts need no protection, unless asked for."""
        if "policy" in self._settings.model_fields_set:
            return False
        pages = (
            self._store.tunings.page(kind, limit=20, state=TuningState.RUNNING)
            for kind in (TuningKind.WEIGHTS, TuningKind.TRAIN)
        )
        found = [run.id for page in pages for run in page if run.alias == self._alias]
        return bool(found) and not self._store.tunings.led().isdisjoint(found)  # others were interrupted

    def _drop_rejected(self) -> None:
        dropped = self._store.groups.drop_rejected(self._alias, DropReason.ROLLED_BACK)
        if dropped:
            log.info("event=trajectories_dropped count=%d reason=%s", dropped, DropReason.ROLLED_BACK)


_AUTOMATIC = frozenset({DECIDED_BY, "proof", "evaluation", "sentinel", "invariants", "tuner", "trainer"})


def _hold_reason(ramp: Policy | None, history: Sequence[Decision]) -> str | None:
    """Return why a person must look at the version in its ramp first; None if nobody must."""
    newest = next((one for one in history if ramp is not None and one.version == ramp.version), None)
    held = newest is not None and newest.action is PolicyAction.HOLD
    return f"it waits for a person: {newest.reason}" if held and newest is not None else None


def _served_since(serving: ServingVersions, history: Sequence[Decision]) -> float:
    assert serving.ramp is not None
    began = [one.decided_at for one in history if one.version == serving.ramp.version]
    return min(began) if began else serving.ramp.created_at
