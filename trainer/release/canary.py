"""The gatekeeper: carries out what the gate decides about the canary of one alias, turn by turn.

Promises: each decision is in the store with its evidence; a canary that was held is promoted by a person only, but goes
back by itself where it is proven to be worse; what a rejected version sampled is dropped and counted. While there is a
canary, or a candidate that is held, nothing is trained and nothing else is published, so a roll back has no descendants
to undo. Decides nothing itself: `gate.py` does, on the scores of live traffic; a second judge and the sentinel may only
ask for a person. Waits for nobody.
"""

from __future__ import annotations

import logging

from ratchet.store.errors import InvalidTransition
from ratchet.store.reasons import DropReason
from ratchet.store.records import PastScore, Policy
from ratchet.store.states import PolicyAction, PolicyState
from ratchet.store.store import Store
from ratchet.trainer.controller.judges import Judge
from ratchet.trainer.observability.metrics import Metrics
from ratchet.trainer.release.approval import (
    GetBlockingFindings,
    findings_evidence,
    hold,
    no_blocking_findings,
    objection,
    release,
)
from ratchet.trainer.release.candidates import name_of
from ratchet.trainer.release.decision import Action, Decision, decide
from ratchet.trainer.release.second_opinion import SecondOpinions
from ratchet.trainer.settings.release_settings import ReleaseSettings

log = logging.getLogger(__name__)

_GATE = "release"
_LOOK_EVERY = 1.0  # seconds


class CanaryController:
    """Looks at the scores of the canary and of the live version since it began.

    `second` is asked before a promotion; `doubts` are the sentinel's, which hold one too.
    """

    def __init__(
        self,
        store: Store,
        alias: str,
        settings: ReleaseSettings,
        judge_version: str,
        second: Judge | None = None,
        doubts: GetBlockingFindings = no_blocking_findings,
        metrics: Metrics | None = None,
    ) -> None:
        self._store = store
        self._alias = alias
        self._settings = settings
        self._judge_version = judge_version
        self._second = SecondOpinions(second, settings.second_judge_pairs, store.trajectories.read) if second else None
        self._blocking_findings = doubts
        self._metrics = metrics or Metrics(alias)
        self._looked_at = 0.0
        self.pending = True  # there is a version that is not decided on, or it is not known yet

    def close(self) -> None:
        """Let go of the second judge."""
        if self._second is not None:
            self._second.close()

    def turn(self, now: float) -> bool:
        """Look at the canary, if there is one; return whether something was decided."""
        policies = self._store.policies.all(self._alias)
        decided = False
        canary = next((policy for policy in policies if policy.state is PolicyState.CANARY), None)
        live = next((policy for policy in policies if policy.state is PolicyState.LIVE), None)
        undecided = canary is not None or self._store.policies.held(self._alias) is not None
        if self.pending and not undecided:
            release(self._store, self._alias)
        self.pending = undecided
        if canary is None:
            self._metrics.gate()
        if canary is not None and live is not None and now - self._looked_at >= _LOOK_EVERY:
            self._looked_at = now
            try:
                decided = self._look(canary, live, now)
            except InvalidTransition as overtaken:  # a person was quicker
                log.info("event=gate_overtaken reason=%r", str(overtaken))
        if decided or any(policy.state is PolicyState.REJECTED for policy in policies):
            self._drop_rejected()
        return decided

    def _look(self, canary: Policy, live: Policy, now: float) -> bool:
        told = self._store.decisions.of(self._alias, canary.version)
        since = min((one.decided_at for one in told if one.action is PolicyAction.CANARY), default=canary.created_at)
        scores = self._store.groups.rewards(self._alias, self._judge_version, canary.version)
        beside = self._store.groups.rewards(self._alias, self._judge_version, live.version, since)
        late = now - since > self._settings.deadline_seconds
        decision = decide([one.score for one in scores], [one.score for one in beside], self._settings.rules(), late)
        self._metrics.gate(len(scores), len(beside), decision.found)
        held = bool(told) and told[0].action is PolicyAction.HOLD
        if decision.action is Action.ROLLBACK:
            self._roll_back(canary, live, decision)
        elif held or decision.action is Action.WAIT:
            return False
        else:
            return self._promote(canary, decision, scores, beside)
        return True

    def _promote(self, canary: Policy, decision: Decision, scores: list[PastScore], beside: list[PastScore]) -> bool:
        """Promote, or hold where anything speaks against it; return False while the second judge thinks."""
        doubts = self._blocking_findings()
        evidence = decision.evidence() | findings_evidence(doubts)
        reasons = [decision.reason if decision.action is Action.HOLD else None, objection(doubts)]
        if self._second is not None and decision.found is not None:
            opinion = self._second.of(canary.version, scores, beside)
            if opinion is None:
                return False
            evidence |= opinion.evidence()
            reasons.insert(1, opinion.objection(decision.found))
        if told := "; ".join(filter(None, reasons)):
            hold(self._store, canary, told, evidence, by=_GATE)
            return True
        self._store.policies.promote(self._alias, canary.version, evidence, by=_GATE, reason=decision.reason)
        self.pending = False
        log.info("event=policy_promoted policy=%s reason=%r", name_of(canary), decision.reason)
        return True

    def _roll_back(self, canary: Policy, live: Policy, decision: Decision) -> None:
        rejected = self._store.policies.roll_back(
            self._alias, live.version, decision.evidence(), by=_GATE, reason=decision.reason
        )
        release(self._store, self._alias)
        self.pending = False
        names = ",".join(map(name_of, rejected))
        log.warning("event=policy_rolled_back policies=%s to=%s reason=%r", names, live.version, decision.reason)

    def _drop_rejected(self) -> None:
        dropped = self._store.groups.drop_rejected(self._alias, DropReason.ROLLED_BACK)
        if dropped:
            log.info("event=trajectories_dropped count=%d reason=%s", dropped, DropReason.ROLLED_BACK)
