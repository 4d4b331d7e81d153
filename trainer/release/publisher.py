"""Publishing: from a candidate on disk to the live version or the canary on every replica, and old versions out again.

Order: load everywhere under a new name, prove everywhere, flip in the store, wait for the doors, drain, unload.
Promises: no version becomes live that a replica does not serve as the trainer made it; one whose proof cannot decide is
left `unproven`, and the next one is proven against what is in service, so that the distance grows; no version is
unloaded while a trajectory is pinned to it. Does not train. Does not wait for an evaluation: it is asked again when
that is over, and proves the candidate anew. Of the decision whether a version is better it makes the first part, on
held-out tasks.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Protocol

from ratchet.store.coordination.proxies import PROXY_TIMEOUT_SECONDS
from ratchet.store.records import BASE_VERSION, Policy
from ratchet.store.states import PolicyState
from ratchet.store.store import Store
from ratchet.trainer.adapters.vllm_api import Replica
from ratchet.trainer.errors import AdapterRefused
from ratchet.trainer.release.approval import (
    GetBlockingFindings,
    findings_evidence,
    hold,
    no_blocking_findings,
    objection,
)
from ratchet.trainer.release.candidates import is_trained, name_of
from ratchet.trainer.release.evaluation_runner import Evaluations
from ratchet.trainer.release.proof import Answer, Outcome, Proof, prove

log = logging.getLogger(__name__)

_TOKENS = 3  # likeliest next tokens compared after each probe
_ASKED = 20  # of every version, so that those are among them; vLLM gives no more by default
UNPROVEN = "swap_unproven"  # the alarm
REMEDY = (
    "If this lasts: raise trainer.learner.target_kl or learning_rate, train larger rounds (groups_per_round), or serve "
    "and train in float32"
)


class Scorer(Protocol):
    """Who computes logprobs of every id of a sequence as the trainer does; `trainer.learner.Learner` is one."""

    def score(self, rows: Sequence[Sequence[int]], *, adapter: bool | Path = True) -> list[tuple[float, ...]]:
        """Under the newest version, under the base model with False, or under the adapter in a folder."""
        ...


class Publisher:
    """Moves the newest candidate of one alias to live, or rejects it with the reason.

    With a `share` it becomes a canary, and the gate decides further; without one, the sentinel's doubts hold it.
    """

    def __init__(
        self,
        store: Store,
        replicas: Sequence[Replica],
        *,
        alias: str,
        tolerance: float,
        keep_loaded_adapters: int,
        share: float | None = None,
        evaluations: Evaluations | None = None,
        max_gain: float | None = None,
        doubts: GetBlockingFindings = no_blocking_findings,
    ) -> None:
        self._store = store
        self._replicas = replicas
        self._alias = alias
        self._tolerance = tolerance
        self._keep_loaded = keep_loaded_adapters
        self._share = share
        self._evaluations = evaluations
        self._max_gain = max_gain
        self.waits = False  # a candidate is being tried
        self._blocking_findings = doubts

    def publish(self, candidate: Policy, probes: Sequence[Sequence[int]], scorer: Scorer) -> bool:
        """Load, prove, evaluate and release a candidate; return whether it serves now. `waits` says that it is tried.

        `probes` are id sequences; the scorer stands where the candidate was made. Raises EngineUnreachable when a
        replica does not answer: the candidate stays one, and publishing it again is safe.
        """
        self.waits = False
        live = self._store.policies.live().get(self._alias)
        if live is None:
            raise AdapterRefused(f"alias {self._alias} has no base version in the store: start `ratchet proxy` first")
        try:
            proofs = self._serve_everywhere(candidate, live, probes, scorer)
        except ProofFailed as refusal:
            settle = self._reject if refusal.outcome is Outcome.WRONG else self._leave_unproven
            return settle(candidate, str(refusal), refusal.proofs)
        reason = _shown(candidate, live, proofs)
        evidence = _evidence(proofs)
        if self._evaluations is not None:
            found = self._evaluations.of(candidate, live)
            if found is None:
                self.waits = True
                return False
            evidence |= found.evidence()
            if found.first is not None and found.first.worse:
                return self._reject_as_worse(candidate, found.told(), evidence)
            if told := found.objection(self._max_gain):
                hold(
                    self._store,
                    candidate,
                    told,
                    evidence | findings_evidence(self._blocking_findings()),
                    by="evaluation",
                )
                return False
            reason = f"{reason}; {found.told()}" if found.first is not None else reason
        return self._release(candidate, live, evidence, reason)

    def _release(self, candidate: Policy, live: Policy, evidence: dict[str, object], reason: str) -> bool:
        """Let a proven version serve all or, where there is a gate, a share; return whether it does."""
        if self._share is None:
            doubts = self._blocking_findings()
            if told := objection(doubts):
                hold(self._store, candidate, told, evidence | findings_evidence(doubts), by="sentinel")
                return False
            self._store.policies.promote(
                self._alias, candidate.version, evidence, only_from=PolicyState.CANDIDATE, reason=reason
            )
        else:
            self._store.policies.canary(
                self._alias, candidate.version, self._share, evidence, by="proof", reason=reason
            )
        self._store.alarms.clear(f"swap_refused:{self._alias}")
        self._store.alarms.clear(f"{UNPROVEN}:{self._alias}")
        event = "policy_live" if self._share is None else "policy_canary"
        log.info(
            "event=%s policy=%s@%d beside=%d reason=%r", event, self._alias, candidate.version, live.version, reason
        )
        return True

    def _serve_everywhere(
        self, candidate: Policy, live: Policy, probes: Sequence[Sequence[int]], scorer: Scorer
    ) -> dict[str, Proof]:
        """Load both versions on every replica and prove the new one; one that is served already needs no proof.

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
                raise ProofFailed(str(refusal), Outcome.WRONG, proofs) from refusal
        for outcome in (Outcome.WRONG, Outcome.UNPROVEN):
            for url, proof in proofs.items():
                if proof.outcome is outcome:
                    raise ProofFailed(f"{url}: {proof.reason}", outcome, proofs)
        return proofs

    def drain(self, now: float) -> list[str]:
        """Unload old versions that nobody needs any more; return their names.

        A version goes when every open door serves a newer one, none has a trajectory pinned to it, and it is not among
        the newest `keep_loaded_adapters` old ones; no version goes whose adapter another one needs.
        """
        policies = self._store.policies.all(self._alias)
        if not self._store.policies.unproven(self._alias):  # also where they were rolled back
            self._store.alarms.clear(f"{UNPROVEN}:{self._alias}")
        doors = self._store.doors.open(self._alias, now - PROXY_TIMEOUT_SECONDS)
        live = next((policy.version for policy in policies if policy.state is PolicyState.LIVE), BASE_VERSION)
        if any(door.live.get(self._alias) != live for door in doors):
            return []
        pinned = {name for door in doors for name, count in door.pins.items() if count}
        spare = _spare(policies, pinned, self._keep_loaded)
        unloaded: list[str] = []
        for replica in self._replicas if spare else ():
            for name in sorted(spare & set(replica.models())):
                replica.unload(name)
                unloaded.append(name)
                log.info("event=policy_unloaded policy=%s replica=%s", name, replica.url)
        return unloaded

    def _reject(self, candidate: Policy, reason: str, proofs: dict[str, Proof]) -> bool:
        told = _evidence(proofs) | {"reason": reason}
        self._store.policies.reject(self._alias, candidate.version, told, reason=reason)
        self._store.alarms.raise_(f"swap_refused:{self._alias}", f"{name_of(candidate)} was not made live: {reason}")
        log.error("event=policy_rejected policy=%s reason=%r", name_of(candidate), reason)
        self._unload(candidate)
        return False

    def _leave_unproven(self, candidate: Policy, reason: str, proofs: dict[str, Proof]) -> bool:
        """Put a candidate aside that changes too little to be proven; what is trained next is built on it."""
        told = _evidence(proofs) | {"reason": reason}
        self._store.policies.mark_unproven(self._alias, candidate.version, told, reason=reason)
        waiting = self._store.policies.unproven(self._alias)
        self._store.alarms.raise_(
            f"{UNPROVEN}:{self._alias}",
            f"{name_of(candidate)} serves nobody, nor do {len(waiting) - 1} before it: {reason}; training goes on, and "
            f"the next version is measured against what is in service. {REMEDY}",
        )
        log.warning("event=policy_unproven policy=%s reason=%r", name_of(candidate), reason)
        self._unload(candidate)
        return False

    def _reject_as_worse(self, candidate: Policy, reason: str, evidence: dict[str, object]) -> bool:
        """Reject a candidate that is worse; that is no fault, so there is no alarm."""
        self._store.policies.reject(self._alias, candidate.version, evidence, by="evaluation", reason=reason)
        self._store.alarms.clear(f"swap_refused:{self._alias}")
        log.warning("event=policy_turned_down policy=%s reason=%r", name_of(candidate), reason)
        self._unload(candidate)
        return False

    def _unload(self, candidate: Policy) -> None:
        if not is_trained(candidate):  # the adapter is another version's
            return
        for replica in self._replicas:
            if candidate.served_name in replica.models():
                replica.unload(candidate.served_name)


def prove_served(
    replica: Replica,
    name: str,
    old: Mapping[str, Path | None],
    probes: Sequence[Sequence[int]],
    scorer: Scorer,
    *,
    tolerance: float,
) -> Proof:
    """Compare the next-token logprobs after each probe (ids) under `name` and under older names that a replica serves.

    `old` gives the folder of each older name's adapter, None for the base model; the scorer stands at the new one.
    """
    served = replica.next_logprobs(name, probes, _ASKED)
    before = {other: replica.next_logprobs(other, probes, _ASKED) for other in old}
    asked = [
        (place, token)
        for place, likeliest in enumerate(served)
        for token in _common(likeliest, [answers[place] for answers in before.values()])
    ]
    sequences = [(*probes[place], token) for place, token in asked]

    def trained(adapter: bool | Path) -> list[float]:
        return [logprobs[-1] for logprobs in scorer.score(sequences, adapter=adapter)]

    return prove(
        [place for place, _ in asked],
        Answer([served[place][token] for place, token in asked], trained(adapter=True)),
        {
            other: Answer([before[other][place].get(token) for place, token in asked], trained(folder or False))
            for other, folder in old.items()
        },
        tolerance=tolerance,
    )


def _common(likeliest: Mapping[int, float], others: Sequence[Mapping[int, float]]) -> list[int]:
    """Return the likeliest tokens of which all versions gave the logprob; where there are too few, others too."""
    known = sorted(likeliest, key=lambda token: (sum(token not in other for other in others), -likeliest[token]))
    return known[:_TOKENS]


class ProofFailed(Exception):
    """No replica serves the candidate as the trainer made it, or none can say so; `proofs` are those made so far."""

    def __init__(self, reason: str, outcome: Outcome, proofs: dict[str, Proof]) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.proofs = proofs


def _shown(candidate: Policy, live: Policy, proofs: dict[str, Proof]) -> str:
    """Return what is known of how a candidate is served."""
    if candidate.served_name == live.served_name:
        prompt = f"prompt {candidate.prompt_id}" if candidate.prompt_id else "no prompt"
        return f"{live.served_name} is served already; with {prompt}"
    worst = max((proof.served_vs_trainer for proof in proofs.values()), default=0.0)
    return f"its served logprobs lie {worst:.5f} nats from the trainer's"


def _spare(policies: Sequence[Policy], pinned: Set[str], keep: int) -> set[str]:
    """Return the names of the old adapters that nobody needs, but for the newest `keep` old ones."""
    old = (PolicyState.RETIRED, PolicyState.REJECTED, PolicyState.UNPROVEN)
    serving = {p.served_name for p in policies if p.state not in old}
    held = {p.served_name for p in policies if name_of(p) in pinned}
    names = list(dict.fromkeys(p.served_name for p in policies if p.adapter and p.served_name not in serving))
    return set(names[: max(0, len(names) - keep)]) - held


def _evidence(proofs: dict[str, Proof]) -> dict[str, object]:
    return {"proof": {url: dataclasses.asdict(proof) for url, proof in proofs.items()}}
