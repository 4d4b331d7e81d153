"""The publisher: from a candidate on disk to a version that serves on every replica, and old versions out again.

Order: load everywhere under a new name, prove everywhere, evaluate, change the state in the store, wait for the
proxies, drain, unload. Promises: no version becomes live that a replica does not serve as the trainer made it. A
version whose proof is undecided is left `unproven`, and the next one is proven against what is in service, so the
distance grows. No version is unloaded while a trajectory is pinned to it. Does not train, and does not wait for an
evaluation: the caller publishes the candidate again when the evaluation is over, and the proof is repeated.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence, Set
from enum import StrEnum

from ratchet.store.coordination import PROXY_TIMEOUT_SECONDS
from ratchet.store.records import BASE_VERSION, Policy
from ratchet.store.reports.version_reports import read_unproven
from ratchet.store.states import PolicyState
from ratchet.store.store import Store
from ratchet.trainer.adapters.replica_fleet import ask_all
from ratchet.trainer.adapters.vllm_api import VllmServer
from ratchet.trainer.errors import AdapterRefused
from ratchet.trainer.learner_api.protocol import LogprobScorer
from ratchet.trainer.release.approval import (
    GetBlockingFindings,
    blocking_reason,
    findings_evidence,
    no_blocking_findings,
    require_approval,
)
from ratchet.trainer.release.candidates import is_trained, version_name
from ratchet.trainer.release.evaluation_runner import PreReleaseChecks
from ratchet.trainer.release.invariants_check import KIND as INVARIANTS
from ratchet.trainer.release.proof import Proof, ProofOutcome
from ratchet.trainer.release.replica_proofs import ReplicaProofs
from ratchet.trainer.release.served_proof import Probes, ProofFailed

log = logging.getLogger(__name__)

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
