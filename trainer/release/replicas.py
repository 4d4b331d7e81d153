"""Which replicas serve a version as the trainer made it: at its publication, and again for those that come later."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

from ratchet.store.records import BASE_VERSION, Policy
from ratchet.store.states import SERVING
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
from ratchet.trainer.release.proof import (
    Probes,
    Proof,
    ProofFailed,
    ProofOutcome,
    ServedLogprobs,
    SwapProver,
    TrainerLogprobs,
)

log = logging.getLogger(__name__)

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
