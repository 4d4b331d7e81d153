"""From a candidate on disk to a version that serves on every replica, and old versions out again."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import KW_ONLY, asdict, dataclass
from enum import StrEnum
from typing import Any

from ratchet.store.coordination import PROXY_TIMEOUT_SECONDS
from ratchet.store.records import BASE_VERSION, Policy
from ratchet.store.reports.version_reports import read_unproven
from ratchet.store.states import SERVING, PolicyState
from ratchet.store.store import Store
from ratchet.trainer.adapters.adapter_store import weights_checksum
from ratchet.trainer.adapters.vllm_api import VllmServer, ask_all, quorum_of
from ratchet.trainer.errors import (
    AdapterNotFound,
    AdapterNotServable,
    AdapterRefused,
    CheckpointDamaged,
    EngineError,
    EngineUnreachable,
)
from ratchet.trainer.learner_api import LogprobScorer
from ratchet.trainer.observability.metrics import Finding
from ratchet.trainer.release.candidates import is_trained, version_name
from ratchet.trainer.release.evaluation import PreReleaseChecks
from ratchet.trainer.release.invariants import KIND as INVARIANTS
from ratchet.trainer.release.proof import (
    Probes,
    Proof,
    ProofFailed,
    ProofOutcome,
    ServedLogprobs,
    SwapProver,
    TrainerLogprobs,
)

# Approval: a version waits for a person, with the evidence in the store and an alarm that names the commands.
#
# The version is in its ramp or still a candidate; its state does not change. While one waits, nothing else is
# published; training goes on.

log = logging.getLogger(__name__)

GetBlockingFindings = Callable[[], Sequence[Finding]]  # the sentinel's findings that block a promotion now


def no_blocking_findings() -> Sequence[Finding]:
    """Return nothing: the default without a sentinel."""
    return ()


def require_approval(store: Store, policy: Policy, reason: str, evidence: Mapping[str, Any], *, by: str) -> None:
    """Record that only a person may promote this version, and raise the alarm."""
    store.policies.require_approval(policy.alias, policy.version, evidence, by=by, reason=reason)
    name = version_name(policy)
    remedy = (
        f"`ratchet policies promote {name} --reason WHY` or `ratchet policies rollback {policy.alias} --reason WHY`"
    )
    store.alarms.raise_(_alarm(policy.alias), f"{name} needs approval: {reason}; {remedy}")
    log.warning("event=approval_required policy=%s reason=%r", name, reason)


def clear_approval_alarm(store: Store, alias: str) -> None:
    """Clear the alarm: no version waits for approval any more."""
    store.alarms.clear(_alarm(alias))


def blocking_reason(findings: Sequence[Finding]) -> str | None:
    """Return why nothing may be promoted now; None if no finding gives a reason."""
    reasons = "; ".join(finding.reason for finding in findings if finding.reason)
    return f"the sentinel found that the judges disagree: {reasons}" if reasons else None


def findings_evidence(findings: Sequence[Finding]) -> dict[str, Any]:
    return {"sentinel": [asdict(finding) for finding in findings]} if findings else {}


def _alarm(alias: str) -> str:
    return f"approval_required:{alias}"


# Which replicas serve a version as the trainer made it: at its publication, and again for those that come later.
#
# Promises: publication is all or nothing over the replicas that answer; a replica that does not answer, or does not
# find the files in time, delays nobody, as long as a quorum serves the version. The proven replicas are recorded with
# the version, and the proxy sends it to no other. A replica that comes back, is new or was restarted is loaded and
# proven; one that serves something else is taken out, with an alarm.

MISSING = "replica_missing"  # alarm
WRONG = "replica_wrong"  # alarm
_PAUSES = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0)  # seconds between attempts to load a version that is not found
_CHECK_SECONDS = 5.0  # between two looks at the replicas of what is served


@dataclass(frozen=True, slots=True)
class ServedProofs:
    """The replicas that serve a version as it was trained, with their proofs; and why others do not."""

    proofs: Mapping[str, Proof]  # by URL; empty for a version whose adapter is served already
    proven: tuple[str, ...]
    missing: Mapping[str, str]  # URL -> reason
    checksum: str | None  # SHA-256 of the weights file, where the trainer can read it


@dataclass
class ReplicaProofs:
    """Loads and proves the versions of one alias on the replicas. `quorum`: how many must serve one; None: all of one
    or two, else all but one.
    """

    store: Store
    replicas: Sequence[VllmServer]
    _: KW_ONLY
    alias: str
    tolerance: float
    quorum: int | None = None
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        self._checked_at = 0.0

    def prove(self, candidate: Policy, live: Policy, probes: Probes, scorer: LogprobScorer) -> ServedProofs:
        """Load both versions on the replicas and prove the candidate, unless its adapter is served already.

        Raises ProofFailed, EngineUnreachable if fewer replicas than the quorum answer, and AdapterNotServable.
        """
        replicas = tuple(self.replicas)
        enough = quorum_of(len(replicas), self.quorum)
        same = candidate.served_name == live.served_name
        try:
            checksum = weights_checksum(candidate.adapter) if candidate.adapter and not same else None
        except CheckpointDamaged as damaged:
            raise ProofFailed(str(damaged), ProofOutcome.WRONG, {}) from damaged
        prover = self._prover(candidate, (live, self._base()), probes, TrainerLogprobs(scorer))

        def load_and_measure(replica: VllmServer) -> ServedLogprobs | None:
            for policy in {candidate.served_name: candidate, live.served_name: live}.values():
                self._load(replica, policy)
            return None if same else prover.measure(replica)

        answers, errors = ask_all(replicas, load_and_measure, enough)
        served = {url: answer for url, answer in answers.items() if answer is not None}
        proofs = prover.prove(replicas, served)
        if unservable := [error for error in errors.values() if isinstance(error, AdapterNotServable)]:
            raise unservable[0]
        refusals = [error for error in errors.values() if _is_refusal(error)]
        if refusals:
            raise ProofFailed(str(refusals[0]), ProofOutcome.WRONG, proofs)
        for outcome in (ProofOutcome.WRONG, ProofOutcome.UNPROVEN):
            for url, proof in proofs.items():
                if proof.outcome is outcome:
                    raise ProofFailed(f"{url}: {proof.reason}", outcome, proofs)
        missing = {url: str(error) for url, error in errors.items()}
        if len(answers) < enough:
            raise EngineUnreachable(
                f"{len(answers)} of {len(replicas)} replicas serve {candidate.served_name}, and {enough} must "
                f"(adapters.quorum): {'; '.join(missing.values()) or 'no replica is known'}"
            )
        self._report_missing(missing)
        proven = tuple(replica.url for replica in replicas if replica.url in answers)
        return ServedProofs(proofs, proven, missing, checksum)

    def record(self, policy: Policy, served: ServedProofs) -> None:
        """Record which replicas serve a version; before it gets traffic."""
        self.store.policies.record_replicas(policy.alias, policy.served_name, served.proven)

    def catch_up(self, now: float, probes_of: Callable[[Policy], Probes], scorer: LogprobScorer) -> list[str]:
        """Prove what is served on replicas that came, came back or were restarted; return their URLs.

        Does nothing if it was called a moment ago. A replica that does not answer waits for a later call.
        """
        if now - self._checked_at < _CHECK_SECONDS:
            return []
        self._checked_at = now
        changed: list[str] = []
        missing: dict[str, str] = {}
        replicas = tuple(self.replicas)
        models, errors = ask_all(replicas, VllmServer.models, 1)
        for policy in self._serving():
            lacking = [
                replica
                for replica in replicas
                if replica.url in models
                and (replica.url not in policy.replicas or policy.served_name not in models[replica.url])
            ]
            if lacking:
                changed += self._catch_up(policy, lacking, probes_of(policy), scorer, missing)
        if missing or (replicas and not errors):
            self._report_missing(missing)
        return changed

    def _catch_up(
        self,
        policy: Policy,
        replicas: Sequence[VllmServer],
        probes: Probes,
        scorer: LogprobScorer,
        missing: dict[str, str],
    ) -> list[str]:
        """Prove a version on replicas that lack it; return their URLs, and add those that do not load it yet."""
        prover = self._prover(policy, (self._base(),), probes, TrainerLogprobs(scorer, policy.adapter or False))

        def load_and_measure(replica: VllmServer) -> ServedLogprobs:
            self._load(replica, policy)
            return prover.measure(replica)

        answers, errors = ask_all(replicas, load_and_measure, 1)
        missing |= {url: str(error) for url, error in errors.items() if not _is_refusal(error)}
        proven, wrong = set(policy.replicas), {url: str(error) for url, error in errors.items() if _is_refusal(error)}
        caught_up = []
        for url, proof in prover.prove(replicas, answers).items():
            if proof.outcome is ProofOutcome.WRONG:
                wrong[url] = f"{url}: {proof.reason}"
            elif proof.holds or url in proven:
                proven.add(url)
                caught_up.append(url)
                log.info("event=replica_proven policy=%s replica=%s", policy.served_name, url)
            else:
                log.warning("event=replica_unproven replica=%s reason=%r", url, proof.reason)
        if wrong:
            self.store.alarms.raise_(
                f"{WRONG}:{self.alias}",
                f"{policy.served_name} gets no traffic on a replica: {'; '.join(wrong.values())}; restart that replica "
                "with the base model of the others",
            )
        elif caught_up:
            self.store.alarms.clear(f"{WRONG}:{self.alias}")
        # A replica that is the only proven one stays: without it nobody would serve the version.
        kept = tuple(sorted(proven - wrong.keys())) or policy.replicas
        if kept != tuple(sorted(policy.replicas)):
            self.store.policies.record_replicas(policy.alias, policy.served_name, kept)
        return caught_up

    def _prover(self, policy: Policy, old: Sequence[Policy], probes: Probes, trainer: TrainerLogprobs) -> SwapProver:
        known = {one.served_name: one.adapter for one in old}
        return SwapProver(policy.served_name, policy.adapter or "", known, probes, trainer, self.tolerance)

    def _load(self, replica: VllmServer, policy: Policy) -> None:
        """Load a version; ask again for a while if the replica does not find its files: mounts and stores lag."""
        if policy.adapter is None:
            return
        for pause in _PAUSES:
            try:
                replica.load(policy.served_name, policy.adapter)
            except AdapterNotFound as error:
                log.info(
                    "event=adapter_not_found replica=%s retry_seconds=%.1f reason=%r", replica.url, pause, str(error)
                )
                self.sleep(pause)
            else:
                return
        replica.load(policy.served_name, policy.adapter)

    def _serving(self) -> list[Policy]:
        """Return the versions with traffic whose replicas are recorded, one of each adapter."""
        serving = [
            policy
            for policy in self.store.policies.all(self.alias)
            if policy.state in SERVING and policy.adapter and policy.replicas
        ]
        return list({policy.served_name: policy for policy in serving}.values())

    def _base(self) -> Policy:
        return self.store.policies.get(self.alias, BASE_VERSION)

    def _report_missing(self, missing: Mapping[str, str]) -> None:
        alarm = f"{MISSING}:{self.alias}"
        if missing:
            reason = "; ".join(missing.values())
            log.warning("event=replica_missing alias=%s reason=%r", self.alias, reason)
            self.store.alarms.raise_(
                alarm, f"new versions get no traffic on a replica until it answers and is proven: {reason}"
            )
        else:
            self.store.alarms.clear(alarm)


def _is_refusal(error: EngineError) -> bool:
    """Return whether a replica refuses the adapter; one that does not find it, or fails to load it, is only late."""
    return isinstance(error, AdapterRefused) and not isinstance(error, AdapterNotFound)


# The publisher: from a candidate on disk to a version that serves on every replica, and old versions out again.
#
# Order: load everywhere under a new name, prove everywhere, evaluate, change the state in the store, wait for the
# proxies, drain, unload. Promises: no version becomes live that a replica does not serve as the trainer made it. A
# version whose proof is undecided is left `unproven`, and the next one is proven against what is in service, so the
# distance grows. No version is unloaded while a trajectory is pinned to it. Does not train, and does not wait for an
# evaluation: the caller publishes the candidate again when the evaluation is over, and the proof is repeated.

UNPROVEN = "swap_unproven"  # alarm
BROKEN = "version_broken"  # alarm


class PublishResult(StrEnum):
    """What became of a candidate."""

    RELEASED = "released"  # live, or in its ramp
    EVALUATING = "evaluating"  # still a candidate: publish it again when its evaluation is over
    APPROVAL_REQUIRED = "approval_required"  # still a candidate: a person decides
    UNPROVEN = "unproven"  # it changes too little to be proven
    REJECTED = "rejected"


_CheckOutcome = tuple[PublishResult | None, str]


class Publisher:
    """Publishes the candidates of one alias.

    `ramp_share` returns the share of new trajectories with which a candidate begins its ramp; without one it becomes
    live, unless `blocking_findings` returns a finding of the sentinel.
    """

    def __init__(
        self,
        store: Store,
        replicas: Sequence[VllmServer],
        *,
        alias: str,
        tolerance: float,
        keep_loaded_adapters: int,
        quorum: int | None = None,
        ramp_share: Callable[[Policy], float | None] = lambda candidate: None,
        checks: PreReleaseChecks | None = None,
        max_gain: float | None = None,
        blocking_findings: GetBlockingFindings = no_blocking_findings,
    ) -> None:
        self._store = store
        self._replicas = replicas
        self._alias = alias
        self._proofs = ReplicaProofs(store, replicas, alias=alias, tolerance=tolerance, quorum=quorum)
        self._keep_loaded = keep_loaded_adapters
        self._ramp_share = ramp_share
        self._checks = checks or PreReleaseChecks()
        self._max_gain = max_gain
        self._blocking_findings = blocking_findings

    def publish(self, candidate: Policy, probes: Sequence[Sequence[int]], scorer: LogprobScorer) -> PublishResult:
        """Load, prove, evaluate and release a candidate.

        `probes` are sequences of token ids; the scorer holds the candidate's weights. Raises AdapterRefused if the
        alias has no base version, EngineUnreachable if too few replicas answer, and AdapterNotServable if a limit of
        vLLM excludes the version, which says nothing about it. The candidate stays one: publishing again is safe.
        """
        live = self._store.policies.live().get(self._alias)
        if live is None:
            raise AdapterRefused(f"alias {self._alias} has no base version in the store: start `ratchet proxy` first")
        try:
            served = self._proofs.prove(candidate, live, probes, scorer)
        except ProofFailed as failure:
            if failure.outcome is ProofOutcome.WRONG:
                return self._reject_as_wrong(candidate, str(failure), failure.proofs)
            return self._mark_unproven(candidate, str(failure), failure.proofs)
        self._proofs.record(candidate, served)
        reason = _describe_proofs(candidate, live, served.proofs)
        evidence = _evidence(served.proofs)
        evidence |= {"missing_replicas": dict(served.missing)} if served.missing else {}
        evidence |= {"adapter_sha256": served.checksum} if served.checksum else {}
        for check in (self._check_invariants, self._replay):
            outcome, clause = check(candidate, live, evidence)
            if outcome is not None:
                return outcome
            reason = f"{reason}; {clause}" if clause else reason
        return self._release(candidate, live, evidence, reason)

    def _check_invariants(self, candidate: Policy, live: Policy, evidence: dict[str, object]) -> _CheckOutcome:
        """Return what the invariants decide, if they do, and their result as a clause; adds to the evidence."""
        if self._checks.invariants is None or self._ramp_share(candidate) is None:  # nobody is protected
            return None, ""
        result = self._checks.invariants.result_for(candidate, live)
        if result is None:
            return PublishResult.EVALUATING, ""
        evidence |= result.evidence()
        if result.broken:
            return self._reject_as_broken(candidate, result.describe(), evidence), ""
        return None, result.describe()

    def _replay(self, candidate: Policy, live: Policy, evidence: dict[str, object]) -> _CheckOutcome:
        """Return what the held-out tasks decide, if they do, and their result as a clause; adds to the evidence."""
        if self._checks.replay is None:
            return None, ""
        result = self._checks.replay.result_for(candidate, live)
        if result is None:
            return PublishResult.EVALUATING, ""
        evidence |= result.evidence()
        if result.first is not None and result.first.worse:
            return self._reject_as_worse(candidate, result.describe(), evidence), ""
        if blocked := result.blocking_reason(self._max_gain):
            evidence |= findings_evidence(self._blocking_findings())
            require_approval(self._store, candidate, blocked, evidence, by="evaluation")
            return PublishResult.APPROVAL_REQUIRED, ""
        return None, result.describe()

    def _release(self, candidate: Policy, live: Policy, evidence: dict[str, object], reason: str) -> PublishResult:
        """Begin the ramp of a proven version or, without one, make it live."""
        share = self._ramp_share(candidate)
        if share is None:
            findings = self._blocking_findings()
            if blocked := blocking_reason(findings):
                evidence |= findings_evidence(findings)
                require_approval(self._store, candidate, blocked, evidence, by="sentinel")
                return PublishResult.APPROVAL_REQUIRED
            self._store.policies.promote(
                self._alias, candidate.version, evidence, only_from=PolicyState.CANDIDATE, reason=reason
            )
        else:
            self._store.policies.start_ramp(self._alias, candidate.version, share, evidence, by="proof", reason=reason)
        self._store.alarms.clear(f"swap_refused:{self._alias}")
        self._store.alarms.clear(f"{UNPROVEN}:{self._alias}")
        self._store.alarms.clear(f"{BROKEN}:{self._alias}")
        event = "policy_live" if share is None else "policy_in_ramp"
        log.info("event=%s policy=%s beside=%d reason=%r", event, version_name(candidate), live.version, reason)
        return PublishResult.RELEASED

    def catch_up(self, now: float, probes_of: Callable[[Policy], Probes], scorer: LogprobScorer) -> list[str]:
        """Prove what is served on replicas that came, came back or were restarted; return their URLs."""
        return self._proofs.catch_up(now, probes_of, scorer)

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

    def _reject_as_wrong(self, candidate: Policy, reason: str, proofs: dict[str, Proof]) -> PublishResult:
        """Reject a candidate that a replica refuses, or serves other than the trainer made it."""
        name = version_name(candidate)
        evidence = _evidence(proofs) | {"reason": reason}
        self._store.policies.reject(self._alias, candidate.version, evidence, reason=reason)
        self._store.alarms.raise_(f"swap_refused:{self._alias}", f"{name} was not made live: {reason}")
        log.error("event=policy_rejected policy=%s reason=%r", name, reason)
        self._unload_candidate(candidate)
        return PublishResult.REJECTED

    def _reject_as_broken(self, candidate: Policy, reason: str, evidence: dict[str, object]) -> PublishResult:
        """Reject a candidate that clearly breaks what the live version does."""
        name = version_name(candidate)
        self._store.policies.reject(self._alias, candidate.version, evidence, by=INVARIANTS, reason=reason)
        self._store.alarms.clear(f"swap_refused:{self._alias}")
        self._store.alarms.raise_(
            f"{BROKEN}:{self._alias}",
            f"{name} was rejected before it served anybody: {reason}; check what the judge rewards and learner."
            "learning_rate. The alarm clears with the next version that is released",
        )
        log.error("event=policy_broken policy=%s reason=%r", name, reason)
        self._unload_candidate(candidate)
        return PublishResult.REJECTED

    def _mark_unproven(self, candidate: Policy, reason: str, proofs: dict[str, Proof]) -> PublishResult:
        """Mark a candidate that changes too little to be proven; training continues from it."""
        name = version_name(candidate)
        evidence = _evidence(proofs) | {"reason": reason}
        self._store.policies.mark_unproven(self._alias, candidate.version, evidence, reason=reason)
        if (unproven := read_unproven(self._store, self._alias)) is not None:
            self._store.alarms.raise_(f"{UNPROVEN}:{self._alias}", unproven.describe())
        log.warning("event=policy_unproven policy=%s reason=%r", name, reason)
        self._unload_candidate(candidate)
        return PublishResult.UNPROVEN

    def _reject_as_worse(self, candidate: Policy, reason: str, evidence: dict[str, object]) -> PublishResult:
        """Reject a candidate that is worse. This is no failure, so there is no alarm."""
        self._store.policies.reject(self._alias, candidate.version, evidence, by="evaluation", reason=reason)
        self._store.alarms.clear(f"swap_refused:{self._alias}")
        log.warning("event=policy_rejected_as_worse policy=%s reason=%r", version_name(candidate), reason)
        self._unload_candidate(candidate)
        return PublishResult.REJECTED

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


def _evidence(proofs: Mapping[str, Proof]) -> dict[str, object]:
    return {"proof": {url: dataclasses.asdict(proof) for url, proof in proofs.items()}}
