"""What must hold before a ramp ends, besides the evidence: else a person decides.

A judge that is fooled sees a gain, and no comparison of means finds it out. So a gain above `max_gain`, a second judge
that disagrees, or a finding of the sentinel that the judges disagree holds the version: its ramp goes on, the anchor
stays, and a rollback is still possible.
"""

from __future__ import annotations

import logging

from ratchet.store.records import Policy
from ratchet.store.store import Store
from ratchet.trainer.controller.judges import Judge
from ratchet.trainer.release.approval import (
    GetBlockingFindings,
    blocking_reason,
    findings_evidence,
    require_approval,
)
from ratchet.trainer.release.detectable_loss import mean_difference
from ratchet.trainer.release.evidence import HarmEvidence
from ratchet.trainer.release.release_evidence import decision_evidence
from ratchet.trainer.release.second_opinion import SecondOpinionRunner
from ratchet.trainer.settings.release_settings import ReleaseSettings
from ratchet.trainer.statistics.confidence_sequence import MeanDifference

log = logging.getLogger(__name__)

_UNKNOWN = MeanDifference(0.0, float("-inf"), float("inf"), 0)


class PromotionChecks:
    """The checks before the end of a ramp of one alias. `second` is asked in a thread of its own."""

    def __init__(
        self,
        store: Store,
        alias: str,
        settings: ReleaseSettings,
        judge_version: str,
        second: Judge | None,
        blocking_findings: GetBlockingFindings,
    ) -> None:
        self._store = store
        self._alias = alias
        self._max_gain = settings.max_gain
        self._judge_version = judge_version
        self._blocking_findings = blocking_findings
        self._second = (
            SecondOpinionRunner(second, settings.second_judge_pairs, store.trajectories.read) if second else None
        )

    def close(self) -> None:
        """Close the second judge."""
        if self._second is not None:
            self._second.close()

    def check(self, ramp: Policy, live: Policy, evidence: HarmEvidence, since: float) -> bool | None:
        """Hold the version if a check fails; return True then, False while the second judge works, None to go on."""
        findings = self._blocking_findings()
        recorded = decision_evidence(evidence, self._judge_version) | findings_evidence(findings)
        sums = evidence.ramp_differences.get(ramp.version)
        gain = (mean_difference(sums) if sums is not None else None) or _UNKNOWN
        reasons = [self._gain_reason(gain), blocking_reason(findings)]
        if self._second is not None:
            scores = self._store.groups.rewards
            mine = scores(self._alias, self._judge_version, ramp.version)
            others = scores(self._alias, self._judge_version, live.version, since)
            opinion = self._second.opinion_on(ramp.version, mine, others)
            if opinion is None:
                return False
            recorded |= opinion.evidence()
            reasons.insert(1, opinion.blocking_reason(gain))
        if reason := "; ".join(filter(None, reasons)):
            require_approval(self._store, ramp, reason, recorded, by="release")
            return True
        return None

    def _gain_reason(self, gain: MeanDifference) -> str | None:
        if self._max_gain is None or gain.value <= self._max_gain:
            return None
        interval = f"{gain.low:+.3f} to {gain.high:+.3f}, at all times 95%"
        return f"the gain exceeds max_gain {self._max_gain:g}: {gain.value:+.3f} ({interval})"
