"""Publishing: from a candidate on disk to the live version or the canary on every replica, and old versions out again.

Order: load everywhere under a new name, prove everywhere, flip in the store, wait for the doors, drain, unload.
Promises: no version becomes live that a replica does not serve as the trainer made it; no version is unloaded while a
trajectory is pinned to it. Does not train. Does not wait for an evaluation: it is asked again when that is over, and
proves the candidate anew. Of the decision whether a version is better it makes the first part, on held-out tasks.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence, Set
from pathlib import Path

from store import Store
from store.records import BASE_VERSION, Policy
from store.states import PolicyState
from trainer.errors import AdapterRefused
from trainer.gating.evaluations import Evaluations
from trainer.gating.holding import Doubts, evidence_of, hold, no_doubts, objection
from trainer.publishing.candidates import is_learnt, name_of
from trainer.publishing.engine import Replica
from trainer.publishing.proof import Proof, prove

log = logging.getLogger(__name__)

Score = Callable[[Sequence[Sequence[int]]], list[tuple[float, ...]]]

_TOKENS = 3  # likeliest next tokens compared after each probe
_OLD_TOKENS = 20  # of the live version, so that those are among them; vLLM gives no more by default
DOOR_SILENCE = 10.0  # seconds after which a proxy that does not beat counts as gone


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
        keep_loaded: int,
        share: float | None = None,
        evaluations: Evaluations | None = None,
        jump: float | None = None,
        doubts: Doubts = no_doubts,
    ) -> None:
        self._store = store
        self._replicas = replicas
        self._alias = alias
        self._tolerance = tolerance
        self._keep_loaded = keep_loaded
        self._share = share
        self._evaluations = evaluations
        self._jump = jump
        self.waits = False  # a candidate is being tried
        self._doubts = doubts

    def publish(self, candidate: Policy, probes: Sequence[Sequence[int]], score: Score) -> bool:
        """Load, prove, evaluate and release a candidate; return whether it serves now. `waits` says that it is tried.

        `probes` are id sequences, `score` the trainer's own logprobs of every id of a sequence. Raises
        EngineUnreachable when a replica does not answer: the candidate stays one, and publishing it again is safe.
        """
        self.waits = False
        live = self._store.policies.live().get(self._alias)
        if live is None:
            raise AdapterRefused(f"alias {self._alias} has no base version in the store: start `ratchet proxy` first")
        try:
            proofs = self._serve_everywhere(candidate, live, probes, score)
        except Unproven as refusal:
            return self._reject(candidate, str(refusal), refusal.proofs)
        reason = _shown(candidate, live, proofs)
        evidence = _evidence(proofs)
        if self._evaluations is not None:
            found = self._evaluations.of(candidate, live)
            if found is None:
                self.waits = True
                return False
            evidence |= found.evidence()
            if found.first is not None and found.first.worse:
                return self._turn_down(candidate, found.told(), evidence)
            if told := found.objection(self._jump):
                hold(self._store, candidate, told, evidence | evidence_of(self._doubts()), by="evaluation")
                return False
            reason = f"{reason}; {found.told()}" if found.first is not None else reason
        return self._release(candidate, live, evidence, reason)

    def _release(self, candidate: Policy, live: Policy, evidence: dict[str, object], reason: str) -> bool:
        """Let a proven version serve all or, where there is a gate, a share; return whether it does."""
        if self._share is None:
            doubts = self._doubts()
            if told := objection(doubts):
                hold(self._store, candidate, told, evidence | evidence_of(doubts), by="sentinel")
                return False
            self._store.policies.promote(
                self._alias, candidate.version, evidence, only_from=PolicyState.CANDIDATE, reason=reason
            )
        else:
            self._store.policies.canary(
                self._alias, candidate.version, self._share, evidence, by="proof", reason=reason
            )
        self._store.alarms.clear(f"swap_refused:{self._alias}")
        event = "policy_live" if self._share is None else "policy_canary"
        log.info(
            "event=%s policy=%s@%d beside=%d reason=%r", event, self._alias, candidate.version, live.version, reason
        )
        return True

    def _serve_everywhere(
        self, candidate: Policy, live: Policy, probes: Sequence[Sequence[int]], score: Score
    ) -> dict[str, Proof]:
        """Load both versions on every replica and prove the new one; one that is served already needs no proof.

        Raises Unproven, EngineUnreachable.
        """
        proofs: dict[str, Proof] = {}
        for replica in self._replicas:
            try:
                for policy in {candidate.served_name: candidate, live.served_name: live}.values():
                    if policy.adapter is not None:  # a replica that was restarted has lost it
                        replica.load(policy.served_name, Path(policy.adapter))
                if candidate.served_name == live.served_name:
                    continue
                names = (candidate.served_name, live.served_name)
                proofs[replica.url] = prove_served(replica, names, probes, score, tolerance=self._tolerance)
            except AdapterRefused as refusal:
                raise Unproven(str(refusal), proofs) from refusal
            if not proofs[replica.url].holds:
                raise Unproven(f"{replica.url}: {proofs[replica.url].reason}", proofs)
        return proofs

    def drain(self, now: float) -> list[str]:
        """Unload old versions that nobody needs any more; return their names.

        A version goes when every open door serves a newer one, none has a trajectory pinned to it, and it is not among
        the newest `keep_loaded` old ones; no version goes whose adapter another one needs.
        """
        doors = self._store.doors.open(self._alias, now - DOOR_SILENCE)
        policies = self._store.policies.all(self._alias)
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

    def _turn_down(self, candidate: Policy, reason: str, evidence: dict[str, object]) -> bool:
        """Reject a candidate that is worse; that is no fault, so there is no alarm."""
        self._store.policies.reject(self._alias, candidate.version, evidence, by="evaluation", reason=reason)
        self._store.alarms.clear(f"swap_refused:{self._alias}")
        log.warning("event=policy_turned_down policy=%s reason=%r", name_of(candidate), reason)
        self._unload(candidate)
        return False

    def _unload(self, candidate: Policy) -> None:
        if not is_learnt(candidate):  # the adapter is another version's
            return
        for replica in self._replicas:
            if candidate.served_name in replica.models():
                replica.unload(candidate.served_name)


def prove_served(
    replica: Replica, names: tuple[str, str], probes: Sequence[Sequence[int]], score: Score, *, tolerance: float
) -> Proof:
    """Compare the next-token logprobs after each probe (ids) under the (new, old) names that a replica serves.

    `score` gives the trainer's own logprobs of every id of a sequence, under the new version.
    """
    new, old = names
    served = replica.next_logprobs(new, probes, _TOKENS)
    before = replica.next_logprobs(old, probes, _OLD_TOKENS)
    places = [(place, token) for place, likeliest in enumerate(served) for token in likeliest]
    trained = score([(*probes[place], token) for place, token in places])
    return prove(
        trainer_new=[logprobs[-1] for logprobs in trained],
        served_new=[served[place][token] for place, token in places],
        served_old=[before[place].get(token) for place, token in places],
        tolerance=tolerance,
    )


class Unproven(Exception):
    """A replica does not serve the candidate as the trainer made it; `proofs` are those made so far."""

    def __init__(self, reason: str, proofs: dict[str, Proof]) -> None:
        super().__init__(reason)
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
    old = (PolicyState.RETIRED, PolicyState.REJECTED)
    serving = {p.served_name for p in policies if p.state not in old}
    held = {p.served_name for p in policies if name_of(p) in pinned}
    names = list(dict.fromkeys(p.served_name for p in policies if p.adapter and p.served_name not in serving))
    return set(names[: max(0, len(names) - keep)]) - held


def _evidence(proofs: dict[str, Proof]) -> dict[str, object]:
    return {"proof": {url: dataclasses.asdict(proof) for url, proof in proofs.items()}}
