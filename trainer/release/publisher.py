"""The publisher: from a candidate on disk to the live version or the canary on every replica, and old versions out
again.

Order: load everywhere under a new name, prove everywhere, evaluate, change the state in the store, wait for the
proxies, drain, unload. Promises: no version becomes live that a replica does not serve as the trainer made it. A
version whose proof is undecided is left `unproven`, and the next one is proven against what is in service, so the
distance grows. No version is unloaded while a trajectory is pinned to it. Does not train, and does not wait for an
evaluation: the caller publishes the candidate again when the evaluation is over, and the proof is repeated.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence, Set
from enum import StrEnum
from pathlib import Path

from ratchet.store.coordination.proxies import PROXY_TIMEOUT_SECONDS
from ratchet.store.records import BASE_VERSION, Policy
from ratchet.store.states import PolicyState
from ratchet.store.store import Store
from ratchet.trainer.adapters.vllm_api import VllmServer
from ratchet.trainer.errors import AdapterRefused
from ratchet.trainer.learner_protocol import LogprobScorer
from ratchet.trainer.release.approval import (
    GetBlockingFindings,
    blocking_reason,
    findings_evidence,
    no_blocking_findings,
    require_approval,
)
from ratchet.trainer.release.candidates import is_trained, version_name
from ratchet.trainer.release.evaluation_runner import EvaluationRunner
from ratchet.trainer.release.proof import Proof, ProofOutcome
from ratchet.trainer.release.served_proof import ProofFailed, prove_served

log = logging.getLogger(__name__)

UNPROVEN = "swap_unproven"  # the alarm
REMEDY = (
    "If this lasts: raise trainer.learner.target_kl or learning_rate, train larger rounds (groups_per_round), or serve "
    "and train in float32"
)


class PublishResult(StrEnum):
    """What became of a candidate."""

    RELEASED = "released"  # live, or the canary
    EVALUATING = "evaluating"  # still a candidate: publish it again when its evaluation is over
    APPROVAL_REQUIRED = "approval_required"  # still a candidate: a person decides
    UNPROVEN = "unproven"  # it changes too little to be proven
    REJECTED = "rejected"


class Publisher:
    """Publishes the candidates of one alias.

    With a `canary_share` a candidate becomes a canary; without one it becomes live, unless `blocking_findings` returns
    a finding of the sentinel.
    """

    def __init__(
        self,
        store: Store,
        replicas: Sequence[VllmServer],
        *,
        alias: str,
        tolerance: float,
        keep_loaded_adapters: int,
        canary_share: float | None = None,
        evaluations: EvaluationRunner | None = None,
        max_gain: float | None = None,
        blocking_findings: GetBlockingFindings = no_blocking_findings,
    ) -> None:
        self._store = store
        self._replicas = replicas
        self._alias = alias
        self._tolerance = tolerance
        self._keep_loaded = keep_loaded_adapters
        self._canary_share = canary_share
        self._evaluations = evaluations
        self._max_gain = max_gain
        self._blocking_findings = blocking_findings

    def publish(self, candidate: Policy, probes: Sequence[Sequence[int]], scorer: LogprobScorer) -> PublishResult:
        """Load, prove, evaluate and release a candidate.

        `probes` are sequences of token ids; the scorer holds the candidate's weights. Raises AdapterRefused if the
        alias has no base version, and EngineUnreachable if a replica does not answer: publishing again is safe.
        """
        live = self._store.policies.live().get(self._alias)
        if live is None:
            raise AdapterRefused(f"alias {self._alias} has no base version in the store: start `ratchet proxy` first")
        try:
            proofs = self._serve_everywhere(candidate, live, probes, scorer)
        except ProofFailed as failure:
            if failure.outcome is ProofOutcome.WRONG:
                return self._reject_as_wrong(candidate, str(failure), failure.proofs)
            return self._mark_unproven(candidate, str(failure), failure.proofs)
        reason = _describe_proofs(candidate, live, proofs)
        evidence = _evidence(proofs)
        if self._evaluations is not None:
            result = self._evaluations.result_for(candidate, live)
            if result is None:
                return PublishResult.EVALUATING
            evidence |= result.evidence()
            if result.first is not None and result.first.worse:
                return self._reject_as_worse(candidate, result.describe(), evidence)
            if blocking_reason := result.blocking_reason(self._max_gain):
                evidence |= findings_evidence(self._blocking_findings())
                require_approval(self._store, candidate, blocking_reason, evidence, by="evaluation")
                return PublishResult.APPROVAL_REQUIRED
            reason = f"{reason}; {result.describe()}" if result.first is not None else reason
        return self._release(candidate, live, evidence, reason)

    def _release(self, candidate: Policy, live: Policy, evidence: dict[str, object], reason: str) -> PublishResult:
        """Make a proven version live or, with a canary share, the canary."""
        if self._canary_share is None:
            findings = self._blocking_findings()
            if blocked := blocking_reason(findings):
                evidence |= findings_evidence(findings)
                require_approval(self._store, candidate, blocked, evidence, by="sentinel")
                return PublishResult.APPROVAL_REQUIRED
            self._store.policies.promote(
                self._alias, candidate.version, evidence, only_from=PolicyState.CANDIDATE, reason=reason
            )
        else:
            self._store.policies.start_canary(
                self._alias, candidate.version, self._canary_share, evidence, by="proof", reason=reason
            )
        self._store.alarms.clear(f"swap_refused:{self._alias}")
        self._store.alarms.clear(f"{UNPROVEN}:{self._alias}")
        event = "policy_live" if self._canary_share is None else "policy_canary"
        log.info("event=%s policy=%s beside=%d reason=%r", event, version_name(candidate), live.version, reason)
        return PublishResult.RELEASED

    def _serve_everywhere(
        self, candidate: Policy, live: Policy, probes: Sequence[Sequence[int]], scorer: LogprobScorer
    ) -> dict[str, Proof]:
        """Load both versions on every replica and prove the new one, unless its adapter is served already.

        Raises ProofFailed, EngineUnreachable.
        """
        base = self._store.policies.get(self._alias, BASE_VERSION)
        old = {policy.served_name: Path(policy.adapter) if policy.adapter else None for policy in (live, base)}
        proofs: dict[str, Proof] = {}
        for replica in self._replicas:
            try:
                for policy in {candidate.served_name: candidate, live.served_name: live}.values():
                    if policy.adapter is not None:  # a replica that was restarted has lost it
                        replica.load(policy.served_name, Path(policy.adapter))
                if candidate.served_name == live.served_name:
                    continue
                proofs[replica.url] = prove_served(
                    replica, candidate.served_name, old, probes, scorer, tolerance=self._tolerance
                )
            except AdapterRefused as refusal:
                raise ProofFailed(str(refusal), ProofOutcome.WRONG, proofs) from refusal
        for outcome in (ProofOutcome.WRONG, ProofOutcome.UNPROVEN):
            for url, proof in proofs.items():
                if proof.outcome is outcome:
                    raise ProofFailed(f"{url}: {proof.reason}", outcome, proofs)
        return proofs

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
        unloaded: list[str] = []
        for replica in self._replicas if unneeded else ():
            for name in sorted(unneeded & set(replica.models())):
                replica.unload(name)
                unloaded.append(name)
                log.info("event=policy_unloaded policy=%s replica=%s", name, replica.url)
        return unloaded

    def _reject_as_wrong(self, candidate: Policy, reason: str, proofs: dict[str, Proof]) -> PublishResult:
        """Reject a candidate that a replica refuses, or serves other than the trainer made it."""
        name = version_name(candidate)
        evidence = _evidence(proofs) | {"reason": reason}
        self._store.policies.reject(self._alias, candidate.version, evidence, reason=reason)
        self._store.alarms.raise_(f"swap_refused:{self._alias}", f"{name} was not made live: {reason}")
        log.error("event=policy_rejected policy=%s reason=%r", name, reason)
        self._unload(candidate)
        return PublishResult.REJECTED

    def _mark_unproven(self, candidate: Policy, reason: str, proofs: dict[str, Proof]) -> PublishResult:
        """Mark a candidate that changes too little to be proven; training continues from it."""
        name = version_name(candidate)
        evidence = _evidence(proofs) | {"reason": reason}
        self._store.policies.mark_unproven(self._alias, candidate.version, evidence, reason=reason)
        unproven = self._store.policies.list_unproven(self._alias)
        self._store.alarms.raise_(
            f"{UNPROVEN}:{self._alias}",
            f"{name} serves nobody, nor do {len(unproven) - 1} before it: {reason}; training goes on, and "
            f"the next version is measured against what is in service. {REMEDY}",
        )
        log.warning("event=policy_unproven policy=%s reason=%r", name, reason)
        self._unload(candidate)
        return PublishResult.UNPROVEN

    def _reject_as_worse(self, candidate: Policy, reason: str, evidence: dict[str, object]) -> PublishResult:
        """Reject a candidate that is worse. This is no failure, so there is no alarm."""
        self._store.policies.reject(self._alias, candidate.version, evidence, by="evaluation", reason=reason)
        self._store.alarms.clear(f"swap_refused:{self._alias}")
        log.warning("event=policy_rejected_as_worse policy=%s reason=%r", version_name(candidate), reason)
        self._unload(candidate)
        return PublishResult.REJECTED

    def _unload(self, candidate: Policy) -> None:
        if not is_trained(candidate):  # the adapter is another version's
            return
        for replica in self._replicas:
            if candidate.served_name in replica.models():
                replica.unload(candidate.served_name)


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
