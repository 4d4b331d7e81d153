"""The gatekeeper: carries out what the gate decides about the canary of one alias, turn by turn.

Promises: each decision is in the store with its evidence; a canary that was held is promoted by a person only, but goes
back by itself where it is proven to be worse; what a rejected version sampled is dropped and counted. While there is a
canary nothing is trained and nothing else is published, so a roll back has no descendants to undo. Decides nothing
itself: `gate.py` does, on the scores of live traffic.
"""

from __future__ import annotations

import logging
from typing import Any

from store import Store
from store.errors import ForbiddenChange
from store.records import PastScore, Policy
from store.states import PolicyAction, PolicyState
from trainer.gating.gate import Action, Decision, decide
from trainer.gating.gate_settings import GateSettings
from trainer.gating.second_opinion import ask, pair_up
from trainer.judges import Judge
from trainer.publishing.candidates import name_of

log = logging.getLogger(__name__)

ROLLED_BACK = "rolled_back"  # a rejected version sampled it
_GATE = "gate"
_LOOK_EVERY = 1.0  # seconds


class Gatekeeper:
    """Looks at the scores of the canary and of the live version since it began."""

    def __init__(
        self, store: Store, alias: str, settings: GateSettings, judge_version: str, second: Judge | None = None
    ) -> None:
        self._store = store
        self._alias = alias
        self._settings = settings
        self._judge_version = judge_version
        self._second = second
        self._looked_at = 0.0
        self.pending = False  # there is a canary that is not decided on

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
        if canary is None and self.pending:
            self._store.alarms.clear(f"held:{self._alias}")
        self.pending = canary is not None
        if canary is not None and live is not None and now - self._looked_at >= _LOOK_EVERY:
            self._looked_at = now
            try:
                decided = self._look(canary, live, now)
            except ForbiddenChange as overtaken:  # a person was quicker
                log.info("event=gate_overtaken reason=%r", str(overtaken))
        if decided or any(policy.state is PolicyState.REJECTED for policy in policies):
            self._drop_rejected()
        return decided

    def _look(self, canary: Policy, live: Policy, now: float) -> bool:
        told = self._store.decisions.of(self._alias, canary.version)
        since = min((one.decided_at for one in told if one.action is PolicyAction.CANARY), default=canary.created_at)
        scores = self._store.groups.rewards(self._alias, self._judge_version, canary.version)
        beside = self._store.groups.rewards(self._alias, self._judge_version, live.version, since)
        late = now - since > self._settings.patience_seconds
        decision = decide([one.score for one in scores], [one.score for one in beside], self._settings.rules(), late)
        held = bool(told) and told[0].action is PolicyAction.HOLD
        if decision.action is Action.ROLLBACK:
            self._roll_back(canary, live, decision)
        elif held or decision.action is Action.WAIT:
            return False
        elif decision.action is Action.HOLD:
            self._hold(canary, decision.reason, decision.evidence())
        else:
            self._promote(canary, decision, scores, beside)
        return True

    def _promote(self, canary: Policy, decision: Decision, scores: list[PastScore], beside: list[PastScore]) -> None:
        evidence = decision.evidence()
        if self._second is not None and decision.found is not None:
            pairs = pair_up(scores, beside, self._settings.second_pairs)
            opinion = ask(self._second, pairs, self._store.trajectories.read)
            evidence |= opinion.evidence()
            if objection := opinion.objection(decision.found):
                self._hold(canary, objection, evidence)
                return
        self._store.policies.promote(self._alias, canary.version, evidence, by=_GATE, reason=decision.reason)
        self.pending = False
        log.info("event=policy_promoted policy=%s reason=%r", name_of(canary), decision.reason)

    def _hold(self, canary: Policy, reason: str, evidence: dict[str, Any]) -> None:
        self._store.policies.hold(self._alias, canary.version, evidence, by=_GATE, reason=reason)
        remedy = f"`ratchet policies promote {self._alias}` or `ratchet policies rollback {self._alias}`"
        self._store.alarms.raise_(f"held:{self._alias}", f"{name_of(canary)} waits for a person: {reason}; {remedy}")
        log.warning("event=policy_held policy=%s reason=%r", name_of(canary), reason)

    def _roll_back(self, canary: Policy, live: Policy, decision: Decision) -> None:
        rejected = self._store.policies.roll_back(
            self._alias, live.version, decision.evidence(), by=_GATE, reason=decision.reason
        )
        self._store.alarms.clear(f"held:{self._alias}")
        self.pending = False
        names = ",".join(map(name_of, rejected))
        log.warning("event=policy_rolled_back policies=%s to=%s reason=%r", names, live.version, decision.reason)

    def _drop_rejected(self) -> None:
        dropped = self._store.groups.drop_rejected(self._alias, ROLLED_BACK)
        if dropped:
            log.info("event=trajectories_dropped count=%d reason=%s", dropped, ROLLED_BACK)
