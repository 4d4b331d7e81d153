"""The release of one alias: from a candidate that a round or a prompt change made to the live version, or out again.

The life of a version (states of `ratchet.store.states.PolicyState`):

    candidate   a round is committed, or a prompt is changed
        |       next_candidate    the next one; skip or reject those that it overtakes
        |       replicas.py       load its adapter on every replica under a new name
        |       proof.py          prove by logprobs that vLLM serves what the trainer made
        |           wrong         -> rejected, with an alarm
        |           undecided     -> unproven: serves nobody, training continues from it
        |       invariants.py     both versions answer recent prompts, in the background; no judge
        |           broken        -> rejected, with an alarm
        |       evaluation.py     compare it with the live version on held-out tasks, in the background
        |           worse         -> rejected
        |           the gain is too large, or a judge disagrees: a person decides
        v
    ramp        it serves a share of new trajectories beside the live version and the anchor
        |       release_evidence.py   reads what trajectories came to; evidence.py, pure, bets on it
        |       policy.py             decides: end the ramp, roll back, move the anchor, change shares; pure
        |       before the end of a ramp: too large a gain, a second judge, the sentinel: a person decides
        v
    live        it serves the rest of new trajectories
        v
    holdback    it was live, and is the anchor that later versions are compared with
        v
    retired     its adapter is unloaded when no trajectory needs it; `learner_work.py` deletes its files

Promises: no version becomes live that a replica does not serve as the trainer made it. A version whose proof is
undecided is left `unproven`, and the next one is proven against what is in service, so the distance grows. No version
is unloaded while a trajectory is pinned to it. No decision is made on evidence that is not current; a rollback needs no
person, and nothing waits for one but the end of a ramp and the move of the anchor; a restart goes on from the store.
Training never waits for a release, except after two rollbacks among ten. Waits for no evaluation: the caller publishes
the candidate again when it is over, and the proof is repeated.

Under the policy `immediate`, and while a run of `tune weights` uses the alias, proven versions become live at once.
`publish` and `drain` ask the replicas, and run in other threads than `check`, which never blocks.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict
from enum import StrEnum
from typing import Any

from ratchet.store.coordination import PROXY_TIMEOUT_SECONDS
from ratchet.store.errors import InvalidTransition
from ratchet.store.policies.serving import ServingVersions, shares_in_force
from ratchet.store.reasons import DropReason
from ratchet.store.records import BASE_VERSION, Decision, Policy
from ratchet.store.reports.version_reports import read_unproven
from ratchet.store.states import PolicyAction, PolicyState, TuningKind, TuningState
from ratchet.store.store import Store
from ratchet.trainer.adapters.vllm_api import VllmServer, ask_all
from ratchet.trainer.errors import AdapterRefused
from ratchet.trainer.judges.judgement import Judge
from ratchet.trainer.learner_api import LogprobScorer
from ratchet.trainer.observability.metrics import Finding, TrainerMetrics
from ratchet.trainer.release.evaluation import (
    EvaluationRunner,
    SecondOpinion,
    is_trained,
    second_judge_reason,
    version_name,
)
from ratchet.trainer.release.invariants import KIND as INVARIANTS
from ratchet.trainer.release.policy import (
    ReleaseAction,
    ReleaseDecision,
    ReleaseRules,
    ReleaseState,
    decide,
    is_cause_unresolved,
    shares_of,
)
from ratchet.trainer.release.proof import Probes, Proof, ProofFailed, ProofOutcome
from ratchet.trainer.release.release_evidence import (
    OutcomeCounter,
    decision_evidence,
    describe_release,
    mean_difference,
)
from ratchet.trainer.release.replicas import ReplicaProofs
from ratchet.trainer.settings.judge_specs import gives_only_ranks
from ratchet.trainer.settings.trainer_settings import TrainerSettings
from ratchet.trainer.statistics import MeanDifference

log = logging.getLogger(__name__)

DECIDED_BY = "release"
REFUSED, UNPROVEN, BROKEN = "swap_refused", "swap_unproven", "version_broken"  # alarms of candidates
_AUTOMATIC = frozenset({DECIDED_BY, "proof", "evaluation", "sentinel", "invariants", "tuner", "trainer"})
_CHECK_SECONDS = 1.0
_IDLE_CHECK_SECONDS = 10.0  # while no version is in its ramp
_RECORD_SECONDS = 10.0
_IDLE_RECORD_SECONDS = 30.0
_HISTORY = 1000  # decisions
_SECOND_JUDGE_PAIRS = 20  # of a trajectory of the ramp and a live one
_UNKNOWN = MeanDifference(0.0, float("-inf"), float("inf"), 0)

BlockingFindings = Callable[[], Sequence[Finding]]  # the sentinel's findings that block a promotion now


class PublishResult(StrEnum):
    """What became of a candidate."""

    RELEASED = "released"  # live, or in its ramp
    EVALUATING = "evaluating"  # still a candidate: publish it again when its evaluation is over
    APPROVAL_REQUIRED = "approval_required"  # still a candidate: a person decides
    UNPROVEN = "unproven"  # it changes too little to be proven
    REJECTED = "rejected"


class Release:
    """Publishes the candidates of one alias, and decides about its versions that serve.

    `checks` examine a proven candidate, and `second` is asked before the end of a ramp; `blocking_findings` returns the
    sentinel's findings that block it.
    """

    def __init__(
        self,
        store: Store,
        replicas: Sequence[VllmServer],
        settings: TrainerSettings,
        judge_version: str,
        *,
        checks: Sequence[EvaluationRunner[Any]] = (),
        second: Judge | None = None,
        blocking_findings: BlockingFindings = tuple,
        metrics: TrainerMetrics | None = None,
    ) -> None:
        self._store, self._replicas, self._alias = store, replicas, settings.model
        self._settings, self._keep_loaded = settings.release, settings.keep_loaded_adapters
        self._rules = ReleaseRules.of(settings.release)
        self._round_size = settings.groups_per_round * settings.num_generations
        self._judge_version = judge_version
        self.proofs = ReplicaProofs(
            store, replicas, alias=self._alias, tolerance=settings.proof_tolerance, quorum=settings.adapters.quorum
        )
        self.checks = checks
        self._blocking_findings = blocking_findings
        self._second = (  # asked in a thread of its own
            SecondOpinion(second, _SECOND_JUDGE_PAIRS, store.trajectories.read) if second else None
        )
        self._metrics = metrics or TrainerMetrics(self._alias)
        self._counter = OutcomeCounter(
            store, self._alias, judge_version,
            relative=gives_only_ranks(settings.judge), deadline_seconds=settings.release.deadline_seconds,
        )  # fmt: skip
        self._counted_for: tuple[int, tuple[int, ...]] | None = None  # anchor and releases of the evidence
        self._checked_at = self._recorded_at = 0.0
        self._checked_versions: tuple[int | None, ...] = ()
        self._awaits_approval = True  # or this is not known yet
        self.has_candidate = True  # at the last check, or this is not known yet
        self.is_publishing_blocked = True  # a version is in its ramp, held or pinned, or this is not known yet
        self.pauses_training = False  # the last rollbacks point to a cause that stays
        self.is_immediate = settings.release.policy == "immediate"

    def close(self) -> None:
        """Stop the checks, which are repeated after the next start, and close the second judge."""
        for check in self.checks:
            check.close()
        if self._second is not None:
            self._second.close()

    # Candidates: prove, check, and begin the ramp or, without one, make it live.

    def publish(self, candidate: Policy, probes: Probes, scorer: LogprobScorer) -> PublishResult:
        """Load, prove, evaluate and release a candidate.

        The scorer holds the candidate's weights. Raises AdapterRefused if the alias has no base version,
        EngineUnreachable if too few replicas answer, and AdapterNotServable if a limit of vLLM excludes the version,
        which says nothing about it. The candidate stays one: publishing again is safe.
        """
        live = self._store.policies.live().get(self._alias)
        if live is None:
            raise AdapterRefused(f"alias {self._alias} has no base version in the store: start `ratchet proxy` first")
        try:
            served = self.proofs.prove(candidate, live, probes, scorer)
        except ProofFailed as failure:
            evidence = _proof_evidence(failure.proofs) | {"reason": str(failure)}
            if failure.outcome is ProofOutcome.UNPROVEN:
                return self._mark_unproven(candidate, str(failure), evidence)
            advice = f"{version_name(candidate)} was not made live: {failure}"
            return self._reject(candidate, str(failure), evidence, "proof", REFUSED, advice)
        self._store.policies.record_replicas(self._alias, candidate.served_name, served.proven)  # before any traffic
        evidence = _proof_evidence(served.proofs)
        evidence |= {"missing_replicas": dict(served.missing)} if served.missing else {}
        evidence |= {"adapter_sha256": served.checksum} if served.checksum else {}
        clauses = [_describe_proofs(candidate, live, served.proofs)]
        for check in self.checks:
            if check.kind == INVARIANTS and self.ramp_share(candidate) is None:  # nobody is protected
                continue
            result = check.result_for(candidate, live)
            if result is None:
                return PublishResult.EVALUATING
            evidence |= result.evidence()
            if result.broken and check.kind == INVARIANTS:
                advice = (
                    f"{version_name(candidate)} was rejected before it served anybody: {result.describe()}; check what "
                    "the judge rewards and learner.learning_rate. The alarm clears with the next version that is "
                    "released"
                )
                return self._reject(candidate, result.describe(), evidence, check.kind, BROKEN, advice)
            if result.broken:
                return self._reject(candidate, result.describe(), evidence, check.kind)
            if blocked := result.blocking_reason(self._settings.max_gain):
                self._require_approval(candidate, blocked, evidence | self._findings_evidence(), by=check.kind)
                return PublishResult.APPROVAL_REQUIRED
            clauses.append(result.describe())
        return self._begin(candidate, live, evidence, "; ".join(filter(None, clauses)))

    def _begin(self, candidate: Policy, live: Policy, evidence: dict[str, Any], reason: str) -> PublishResult:
        """Begin the ramp of a proven version or, without one, make it live."""
        share, policies, version = self.ramp_share(candidate), self._store.policies, candidate.version
        if share is None:
            if blocked := self._findings_reason():
                self._require_approval(candidate, blocked, evidence | self._findings_evidence(), by="sentinel")
                return PublishResult.APPROVAL_REQUIRED
            policies.promote(self._alias, version, evidence, only_from=PolicyState.CANDIDATE, reason=reason)
        else:
            policies.start_ramp(self._alias, version, share, evidence, by="proof", reason=reason)
        self._store.alarms.clear(*(f"{alarm}:{self._alias}" for alarm in (REFUSED, UNPROVEN, BROKEN)))
        event = "policy_live" if share is None else "policy_in_ramp"
        log.info("event=%s policy=%s beside=%d reason=%r", event, version_name(candidate), live.version, reason)
        return PublishResult.RELEASED

    def _reject(
        self, candidate: Policy, reason: str, evidence: Mapping[str, Any], by: str, alarm: str = "", advice: str = ""
    ) -> PublishResult:
        """Reject a candidate, with an alarm unless it is only worse than the live version, which is no failure."""
        self._store.policies.reject(self._alias, candidate.version, evidence, by=by, reason=reason)
        if alarm != REFUSED:
            self._store.alarms.clear(f"{REFUSED}:{self._alias}")
        if alarm:
            self._store.alarms.raise_(f"{alarm}:{self._alias}", advice)
        level = logging.ERROR if alarm else logging.WARNING
        log.log(level, "event=policy_rejected policy=%s by=%s reason=%r", version_name(candidate), by, reason)
        self._unload_candidate(candidate)
        return PublishResult.REJECTED

    def _mark_unproven(self, candidate: Policy, reason: str, evidence: Mapping[str, Any]) -> PublishResult:
        """Mark a candidate that changes too little to be proven; training continues from it."""
        self._store.policies.mark_unproven(self._alias, candidate.version, evidence, reason=reason)
        if (unproven := read_unproven(self._store, self._alias)) is not None:
            self._store.alarms.raise_(f"{UNPROVEN}:{self._alias}", unproven.describe())
        log.warning("event=policy_unproven policy=%s reason=%r", version_name(candidate), reason)
        self._unload_candidate(candidate)
        return PublishResult.UNPROVEN

    @property
    def is_evaluating(self) -> bool:
        return any(check.is_running for check in self.checks)

    # Old versions leave the replicas.

    def drain(self, now: float) -> list[str]:
        """Unload old versions that nobody needs any more; return their names.

        A version is unloaded when every open proxy serves a newer one, none has a trajectory pinned to it, and it is
        not among the newest `keep_loaded_adapters` old ones. An adapter that another version needs stays.
        """
        policies = self._store.policies.all(self._alias)
        if not self._store.policies.list_unproven(self._alias):  # also if they were rolled back
            self._store.alarms.clear(f"{UNPROVEN}:{self._alias}")
        proxies = self._store.proxy_instances.running(self._alias, now - PROXY_TIMEOUT_SECONDS)
        live = next((policy.version for policy in policies if policy.state is PolicyState.LIVE), BASE_VERSION)
        if any(proxy.live_versions.get(self._alias) != live for proxy in proxies):
            return []
        pinned = {name for proxy in proxies for name, count in proxy.pinned_trajectories.items() if count}
        unneeded = _unneeded_adapters(policies, pinned, self._keep_loaded)
        return self._unload(unneeded) if unneeded else []

    def _unload_candidate(self, candidate: Policy) -> None:
        if is_trained(candidate):  # else the adapter is another version's
            self._unload({candidate.served_name})

    def _unload(self, names: Set[str]) -> list[str]:
        """Unload adapters on every replica that answers; return a name for each that was loaded."""

        def unload(replica: VllmServer) -> list[str]:
            loaded = sorted(names & set(replica.models()))
            for name in loaded:
                replica.unload(name)
                log.info("event=policy_unloaded policy=%s replica=%s", name, replica.url)
            return loaded

        answers, _ = ask_all(tuple(self._replicas), unload, 1)
        return [name for loaded in answers.values() for name in loaded]

    # Approval: a version waits for a person, with the evidence in the store and an alarm that names the commands. It is
    # in its ramp or still a candidate; its state does not change. While one waits, nothing else is published.

    def _require_approval(self, policy: Policy, reason: str, evidence: Mapping[str, Any], *, by: str) -> None:
        """Record that only a person may promote this version, and raise the alarm."""
        self._store.policies.require_approval(policy.alias, policy.version, evidence, by=by, reason=reason)
        name = version_name(policy)
        remedy = (
            f"`ratchet policies promote {name} --reason WHY` or `ratchet policies rollback {policy.alias} --reason WHY`"
        )
        self._store.alarms.raise_(self._approval_alarm, f"{name} needs approval: {reason}; {remedy}")
        log.warning("event=approval_required policy=%s reason=%r", name, reason)

    @property
    def _approval_alarm(self) -> str:
        return f"approval_required:{self._alias}"

    def _findings_reason(self) -> str | None:
        """Return why nothing may be promoted now; None if no finding gives a reason."""
        reasons = "; ".join(finding.reason for finding in self._blocking_findings() if finding.reason)
        return f"the sentinel found that the judges disagree: {reasons}" if reasons else None

    def _findings_evidence(self) -> dict[str, Any]:
        findings = self._blocking_findings()
        return {"sentinel": [asdict(finding) for finding in findings]} if findings else {}

    # Versions that serve: read what their trajectories came to, and have the store carry out what `policy.py` decides.

    def check(self, now: float) -> bool:
        """Decide on the versions that serve; return whether something was decided."""
        policies = self._store.policies.all(self._alias)
        serving = self._store.policies.serving_of(self._alias)
        self.has_candidate = any(policy.state is PolicyState.CANDIDATE for policy in policies)
        awaiting = self._store.policies.awaiting_approval(self._alias) if self.has_candidate or serving.ramp else None
        if self._awaits_approval and awaiting is None:
            self._store.alarms.clear(self._approval_alarm)
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
            dropped = self._store.groups.drop_rejected(self._alias, DropReason.ROLLED_BACK)
            if dropped:
                log.info("event=trajectories_dropped count=%d reason=%s", dropped, DropReason.ROLLED_BACK)
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
        recorded = decision_evidence(evidence, self._judge_version) | self._findings_evidence()
        sums = evidence.ramp_differences.get(ramp.version)
        gain = (mean_difference(sums) if sums is not None else None) or _UNKNOWN
        reasons = [self._gain_reason(gain), self._findings_reason()]
        if self._second is not None:
            scores = self._store.groups.rewards
            mine = scores(self._alias, self._judge_version, ramp.version)
            others = scores(self._alias, self._judge_version, live.version, since)
            opinion, judge = self._second.about(ramp.version, mine, others), self._second.judge
            if opinion is None:
                return False
            found = opinion.result()
            named = {"judge": judge.name, "judge_version": judge.version}
            recorded["second_judge"] = named | (asdict(found) if found is not None else {})
            reasons.insert(1, second_judge_reason(judge.name, found, gain.value, gain.low))
        if reason := "; ".join(filter(None, reasons)):
            self._require_approval(ramp, reason, recorded, by=DECIDED_BY)
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
                self._store.alarms.clear(self._approval_alarm)
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


def _hold_reason(ramp: Policy | None, history: Sequence[Decision]) -> str | None:
    """Return why a person must look at the version in its ramp first; None if nobody must."""
    newest = next((one for one in history if ramp is not None and one.version == ramp.version), None)
    held = newest is not None and newest.action is PolicyAction.HOLD
    return f"it waits for a person: {newest.reason}" if held and newest is not None else None


def _served_since(serving: ServingVersions, history: Sequence[Decision]) -> float:
    assert serving.ramp is not None
    began = [one.decided_at for one in history if one.version == serving.ramp.version]
    return min(began) if began else serving.ramp.created_at


def _describe_proofs(candidate: Policy, live: Policy, proofs: Mapping[str, Proof]) -> str:
    if candidate.served_name == live.served_name:
        prompt = f"prompt {candidate.prompt_id}" if candidate.prompt_id else "no prompt"
        return f"{live.served_name} is served already; with {prompt}"
    worst = max((proof.served_vs_trainer for proof in proofs.values()), default=0.0)
    return f"its served logprobs differ by {worst:.5f} nats from the trainer's"


def _unneeded_adapters(policies: Sequence[Policy], pinned: Set[str], keep: int) -> set[str]:
    """Return the served names of the old adapters that no version or trajectory needs, without the newest `keep`."""
    old = (PolicyState.RETIRED, PolicyState.REJECTED, PolicyState.UNPROVEN)
    serving = {policy.served_name for policy in policies if policy.state not in old}
    in_use = {policy.served_name for policy in policies if version_name(policy) in pinned}
    names = list(
        dict.fromkeys(policy.served_name for policy in policies if policy.adapter and policy.served_name not in serving)
    )
    return set(names[: max(0, len(names) - keep)]) - in_use


def _proof_evidence(proofs: Mapping[str, Proof]) -> dict[str, Any]:
    return {"proof": {url: dataclasses.asdict(proof) for url, proof in proofs.items()}}


# Select the candidate to publish next: trained versions before prompt changes, the newest of each.
#
# A trained version is never rejected in favour of a prompt that waits. A prompt change uses the adapter that is live
# when it is published; if that is another adapter than the one it was made for, it is recreated on the live one. Any
# other candidate older than the live version can no longer become live, and is rejected.


def next_candidate(store: Store, alias: str) -> Policy | None:
    """Return the candidate to publish next, and skip or reject those that it replaces.

    None while the live version is pinned. Raises InvalidTransition, RecordNotFound.
    """
    live = store.policies.live().get(alias)
    if live is not None and live.pinned_at is not None:
        return None
    waiting = [policy for policy in store.policies.all(alias) if policy.state is PolicyState.CANDIDATE]
    if live is not None:
        waiting = [policy for policy in waiting if not _reject_if_overtaken(store, policy, live)]
    chosen = _newest(waiting)
    if chosen is None or live is None:
        return chosen
    for older in waiting:
        if older is not chosen and is_trained(older) == is_trained(chosen):
            _replace(store, older, "a newer version came first")
    if is_trained(chosen):
        return store.policies.adopt_prompt(alias, chosen.version) if chosen.prompt_id != live.prompt_id else chosen
    return chosen if chosen.served_name == live.served_name else _rebase_prompt(store, chosen, live)


def _reject_if_overtaken(store: Store, policy: Policy, live: Policy) -> bool:
    """Reject a candidate that is older than the live version; return whether it was.

    A prompt for another adapter stays, because it can be recreated on the live one.
    """
    overtaken = policy.version < live.version and (is_trained(policy) or policy.served_name == live.served_name)
    if overtaken:
        reason = f"{version_name(live)}, which is newer, became live first"
        if is_trained(policy) and not is_trained(live):
            reason += f"; it serves {live.served_name}, and the training of {version_name(policy)} is lost"
            log.warning("event=training_lost policy=%s reason=%r", version_name(policy), reason)
        if is_trained(policy) and is_trained(live):
            _replace(store, policy, reason)
        else:
            store.policies.reject(policy.alias, policy.version, {}, reason=reason)
    return overtaken


def _replace(store: Store, policy: Policy, reason: str) -> None:
    """Release a newer version in its place; a trained one is part of the newer one, so it is not rejected."""
    if is_trained(policy):
        store.policies.skip(policy.alias, policy.version, {}, by="release", reason=reason)
    else:
        store.policies.reject(policy.alias, policy.version, {}, reason=reason)


def _newest(waiting: Sequence[Policy]) -> Policy | None:
    trained = [policy for policy in waiting if is_trained(policy)]
    return next(iter((trained or list(waiting))[-1:]), None)


def _rebase_prompt(store: Store, chosen: Policy, live: Policy) -> Policy | None:
    """Return the same prompt on the live adapter; None if that adapter already serves the prompt."""
    rebased = None
    reason = f"its prompt is live already, in {version_name(live)}"
    try:
        rebased = store.policies.register_prompt_version(chosen.alias, chosen.prompt_id, chosen.evidence)
        reason = f"recreated as {version_name(rebased)}: {live.served_name} came first"
    except InvalidTransition as refused:
        log.info("event=prompt_not_rebased policy=%s reason=%r", version_name(chosen), str(refused))
    store.policies.reject(chosen.alias, chosen.version, {}, reason=reason)
    return rebased
