"""Publishing: from a candidate on disk to the live version or the canary on every replica, and old versions out again.

Order: load everywhere under a new name, prove everywhere, flip in the store, wait for the doors, drain, unload.
Promises: no version becomes live that a replica does not serve as the trainer made it; no version is unloaded while a
trajectory is pinned to it. Does not train; of the decision whether a version is better it makes the first part, on
held-out prompts.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from store import Store
from store.records import BASE_VERSION, Policy
from store.states import PolicyState
from trainer.errors import AdapterRefused
from trainer.gating.evaluation import Evaluator
from trainer.publishing.engine import Replica
from trainer.publishing.proof import Proof, prove

log = logging.getLogger(__name__)

Score = Callable[[Sequence[Sequence[int]]], list[tuple[float, ...]]]

_TOKENS = 3  # likeliest next tokens compared after each probe
_OLD_TOKENS = 20  # of the live version, so that those are among them; vLLM gives no more by default
DOOR_SILENCE = 10.0  # seconds after which a proxy that does not beat counts as gone


class Publisher:
    """Moves the newest candidate of one alias to live, or rejects it with the reason.

    With a `share` it becomes a canary, and the gate decides further.
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
        evaluator: Evaluator | None = None,
    ) -> None:
        self._store = store
        self._replicas = replicas
        self._alias = alias
        self._tolerance = tolerance
        self._keep_loaded = keep_loaded
        self._share = share
        self._evaluator = evaluator

    def publish(self, candidate: Policy, probes: Sequence[Sequence[int]], score: Score) -> bool:
        """Load, prove, evaluate and release a candidate; return whether it serves now.

        `probes` are id sequences, `score` the trainer's own logprobs of every id of a sequence. Raises
        EngineUnreachable when a replica does not answer: the candidate stays one, and publishing it again is safe.
        """
        live = self._store.policies.live().get(self._alias)
        if live is None:
            raise AdapterRefused(f"alias {self._alias} has no base version in the store: start `ratchet proxy` first")
        if candidate.adapter is None:
            raise AdapterRefused(f"{candidate.served_name} has no adapter folder")
        proofs: dict[str, Proof] = {}
        for replica in self._replicas:
            try:
                replica.load(candidate.served_name, Path(candidate.adapter))
                if live.adapter is not None:  # a replica that was restarted has lost it
                    replica.load(live.served_name, Path(live.adapter))
                names = (candidate.served_name, live.served_name)
                proofs[replica.url] = prove_served(replica, names, probes, score, tolerance=self._tolerance)
            except AdapterRefused as refusal:
                return self._reject(candidate, str(refusal), proofs)
            if not proofs[replica.url].holds:
                return self._reject(candidate, f"{replica.url}: {proofs[replica.url].reason}", proofs)
        worst = max((proof.served_vs_trainer for proof in proofs.values()), default=0.0)
        reason = f"its served logprobs lie {worst:.5f} nats from the trainer's"
        evaluation = self._evaluator.evaluate(candidate, live) if self._evaluator else None
        evidence = _evidence(proofs) | (evaluation.evidence() if evaluation else {})
        if evaluation is not None:
            reason = f"{reason}; {evaluation.told()}"
            if evaluation.worse:
                return self._turn_down(candidate, evaluation.told(), evidence)
        if self._share is None:
            self._store.policies.promote(
                self._alias, candidate.version, evidence, only_from=PolicyState.CANDIDATE, reason=reason
            )
            event = "policy_live"
        else:
            self._store.policies.canary(
                self._alias, candidate.version, self._share, evidence, by="proof", reason=reason
            )
            event = "policy_canary"
        self._store.alarms.clear(f"swap_refused:{self._alias}")
        log.info("event=%s policy=%s beside=%s proof_nats=%.5f", event, candidate.served_name, live.version, worst)
        return True

    def drain(self, now: float) -> list[str]:
        """Unload old versions that nobody needs any more; return their names.

        A version goes when every open door serves a newer one, none has a trajectory pinned to it, and it is not among
        the newest `keep_loaded` old ones.
        """
        doors = self._store.doors.open(self._alias, now - DOOR_SILENCE)
        policies = self._store.policies.all(self._alias)
        live = next((policy.version for policy in policies if policy.state is PolicyState.LIVE), BASE_VERSION)
        if any(door.live.get(self._alias) != live for door in doors):
            return []
        old = [p for p in policies if p.state in (PolicyState.RETIRED, PolicyState.REJECTED) and p.adapter]
        pinned = {name for door in doors for name, count in door.pins.items() if count}
        spare = [p for p in old[: max(0, len(old) - self._keep_loaded)] if f"{p.alias}@{p.version}" not in pinned]
        unloaded: list[str] = []
        for replica in self._replicas if spare else ():
            served = set(replica.models())
            for policy in spare:
                if policy.served_name in served:
                    replica.unload(policy.served_name)
                    unloaded.append(policy.served_name)
                    log.info("event=policy_unloaded policy=%s replica=%s", policy.served_name, replica.url)
        return unloaded

    def _reject(self, candidate: Policy, reason: str, proofs: dict[str, Proof]) -> bool:
        told = _evidence(proofs) | {"reason": reason}
        self._store.policies.reject(self._alias, candidate.version, told, reason=reason)
        self._store.alarms.raise_(f"swap_refused:{self._alias}", f"{candidate.served_name} was not made live: {reason}")
        log.error("event=policy_rejected policy=%s reason=%r", candidate.served_name, reason)
        self._unload(candidate)
        return False

    def _turn_down(self, candidate: Policy, reason: str, evidence: dict[str, object]) -> bool:
        """Reject a candidate that is worse; that is no fault, so there is no alarm."""
        self._store.policies.reject(self._alias, candidate.version, evidence, by="evaluation", reason=reason)
        self._store.alarms.clear(f"swap_refused:{self._alias}")
        log.warning("event=policy_turned_down policy=%s reason=%r", candidate.served_name, reason)
        self._unload(candidate)
        return False

    def _unload(self, candidate: Policy) -> None:
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


def _evidence(proofs: dict[str, Proof]) -> dict[str, object]:
    return {"proof": {url: dataclasses.asdict(proof) for url, proof in proofs.items()}}
