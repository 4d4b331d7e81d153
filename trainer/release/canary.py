"""The canary controller: carries out the decision about the canary of one alias.

Promises: each decision is in the store with its evidence. A canary that needs approval is promoted by a person only,
but is rolled back without one if it is proven to be worse. What a rejected version sampled is dropped and counted.
While there is a canary, or a candidate that needs approval, nothing is trained and nothing else is published, so a
rollback never has descendants to undo. The decision itself is made by `decision.py` on the scores of live traffic; the
second judge and the sentinel can only require approval. Never blocks.
"""

from __future__ import annotations

import logging

from ratchet.store.errors import InvalidTransition
from ratchet.store.reasons import DropReason
from ratchet.store.records import PastScore, Policy
from ratchet.store.states import PolicyAction, PolicyState
from ratchet.store.store import Store
from ratchet.trainer.controller.judges import Judge
from ratchet.trainer.observability.metrics import TrainerMetrics
from ratchet.trainer.release.approval import (
    GetBlockingFindings,
    blocking_reason,
    clear_approval_alarm,
    findings_evidence,
    no_blocking_findings,
    require_approval,
)
from ratchet.trainer.release.candidates import version_name
from ratchet.trainer.release.decision import ReleaseAction, ReleaseDecision, decide
from ratchet.trainer.release.second_opinion import SecondOpinionRunner
from ratchet.trainer.settings.release_settings import ReleaseSettings

log = logging.getLogger(__name__)

_DECIDED_BY = "release"
_CHECK_INTERVAL = 1.0  # seconds


class CanaryController:
    """Compares the scores of the canary with those of the live version since the canary began.

    `second` is asked before a promotion; `blocking_findings` returns the sentinel's findings that block one.
    """

    def __init__(
        self,
        store: Store,
        alias: str,
        settings: ReleaseSettings,
        judge_version: str,
        second: Judge | None = None,
        blocking_findings: GetBlockingFindings = no_blocking_findings,
        metrics: TrainerMetrics | None = None,
    ) -> None:
        self._store = store
        self._alias = alias
        self._settings = settings
        self._judge_version = judge_version
        self._second = (
            SecondOpinionRunner(second, settings.second_judge_pairs, store.trajectories.read) if second else None
        )
        self._blocking_findings = blocking_findings
        self._metrics = metrics or TrainerMetrics(alias)
        self._checked_at = 0.0
        self.undecided = True  # a version waits for a decision, or this is not known yet

    def close(self) -> None:
        """Close the second judge."""
        if self._second is not None:
            self._second.close()

    def check(self, now: float) -> bool:
        """Decide on the canary, if there is one; return whether something was decided."""
        policies = self._store.policies.all(self._alias)
        decided = False
        canary = next((policy for policy in policies if policy.state is PolicyState.CANARY), None)
        live = next((policy for policy in policies if policy.state is PolicyState.LIVE), None)
        undecided = canary is not None or self._store.policies.awaiting_approval(self._alias) is not None
        if self.undecided and not undecided:
            clear_approval_alarm(self._store, self._alias)
        self.undecided = undecided
        if canary is None:
            self._metrics.canary()
        if canary is not None and live is not None and now - self._checked_at >= _CHECK_INTERVAL:
            self._checked_at = now
            try:
                decided = self._decide(canary, live, now)
            except InvalidTransition as overtaken:  # a person decided first
                log.info("event=canary_decision_overtaken reason=%r", str(overtaken))
        if decided or any(policy.state is PolicyState.REJECTED for policy in policies):
            self._drop_rejected()
        return decided

    def _decide(self, canary: Policy, live: Policy, now: float) -> bool:
        decisions = self._store.decisions.decisions_of(self._alias, canary.version)
        since = min(
            (one.decided_at for one in decisions if one.action is PolicyAction.CANARY), default=canary.created_at
        )
        canary_scores = self._store.groups.rewards(self._alias, self._judge_version, canary.version)
        live_scores = self._store.groups.rewards(self._alias, self._judge_version, live.version, since)
        overdue = now - since > self._settings.deadline_seconds
        decision = decide(
            [one.score for one in canary_scores], [one.score for one in live_scores], self._settings.rules(), overdue
        )
        self._metrics.canary(len(canary_scores), len(live_scores), decision.difference)
        needs_approval = bool(decisions) and decisions[0].action is PolicyAction.HOLD
        if decision.action is ReleaseAction.ROLLBACK:
            self._roll_back(canary, live, decision)
        elif needs_approval or decision.action is ReleaseAction.WAIT:
            return False
        else:
            return self._promote(canary, decision, canary_scores, live_scores)
        return True

    def _promote(
        self,
        canary: Policy,
        decision: ReleaseDecision,
        canary_scores: list[PastScore],
        live_scores: list[PastScore],
    ) -> bool:
        """Promote, or require approval if anything speaks against it; return False while the second judge works."""
        findings = self._blocking_findings()
        evidence = decision.evidence() | findings_evidence(findings)
        reasons = [decision.reason if decision.action is ReleaseAction.HOLD else None, blocking_reason(findings)]
        if self._second is not None and decision.difference is not None:
            opinion = self._second.opinion_on(canary.version, canary_scores, live_scores)
            if opinion is None:
                return False
            evidence |= opinion.evidence()
            reasons.insert(1, opinion.blocking_reason(decision.difference))
        if reason := "; ".join(filter(None, reasons)):
            require_approval(self._store, canary, reason, evidence, by=_DECIDED_BY)
            return True
        self._store.policies.promote(self._alias, canary.version, evidence, by=_DECIDED_BY, reason=decision.reason)
        self.undecided = False
        log.info("event=policy_promoted policy=%s reason=%r", version_name(canary), decision.reason)
        return True

    def _roll_back(self, canary: Policy, live: Policy, decision: ReleaseDecision) -> None:
        rejected = self._store.policies.roll_back(
            self._alias, live.version, decision.evidence(), by=_DECIDED_BY, reason=decision.reason
        )
        clear_approval_alarm(self._store, self._alias)
        self.undecided = False
        names = ",".join(map(version_name, rejected))
        log.warning("event=policy_rolled_back policies=%s to=%s reason=%r", names, live.version, decision.reason)

    def _drop_rejected(self) -> None:
        dropped = self._store.groups.drop_rejected(self._alias, DropReason.ROLLED_BACK)
        if dropped:
            log.info("event=trajectories_dropped count=%d reason=%s", dropped, DropReason.ROLLED_BACK)
