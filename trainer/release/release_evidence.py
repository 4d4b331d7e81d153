"""What is recorded about a release, with each decision and for people (docs/release.md lists the keys). Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ratchet.store.policies.serving import ServingVersions
from ratchet.store.records import Policy
from ratchet.trainer.release.detectable_loss import (
    PERIODS,
    deserved_round_size,
    detectable_loss,
    is_traffic_too_small,
    mean_difference,
)
from ratchet.trainer.release.evidence import HarmEvidence
from ratchet.trainer.release.policy import ReleaseRules


def decision_evidence(evidence: HarmEvidence, judge_version: str) -> dict[str, Any]:
    """Return the evidence that a decision is made on."""
    gain = mean_difference(evidence.anchor_difference)
    return {
        "judge_version": judge_version,
        "anchor": evidence.anchor,
        "harm": {str(release): evidence.harm(release) for release in evidence.releases},
        "anchor_gain": evidence.anchor_gain,
        "counted": evidence.counted,
        "live_minus_anchor": asdict(gain) if gain is not None else None,
    }


def describe_release(
    policy: Policy,
    serving: ServingVersions,
    evidence: HarmEvidence,
    rules: ReleaseRules,
    round_size: int,
    per_day: float,
) -> dict[str, Any]:
    """Return what is known about a version that serves.

    `harm` is the evidence that the versions before it do better; at `enough` it is rolled back. `detectable` is the
    loss that the holdback shows in the median, by period; None while no score is known.
    """
    anchor = serving.anchor.version if serving.anchor is not None else evidence.anchor
    difference, spread = mean_difference(evidence.anchor_difference), evidence.spread
    known = spread > 0.0 and per_day > 0.0
    losses = {
        name: detectable_loss(per_day, days, spread, rules.holdback, 1.0 - rules.holdback) for name, days in PERIODS
    }
    return {
        "harm": evidence.harm(policy.version),
        "streams": evidence.harm_by_stream(policy.version),
        "enough": 1.0 / rules.alpha,
        "counted": evidence.counted_in_ramp.get(policy.version, 0),
        "ramp_length": rules.ramp_length(round_size),
        "anchor": anchor,
        "anchor_gain": evidence.anchor_gain,
        "live_minus_anchor": asdict(difference) if difference is not None else None,
        "per_day": per_day,
        "spread": spread,
        "detectable": losses if known else None,
        "traffic_too_small": is_traffic_too_small(per_day, spread) if known else None,
        "deserved_round_size": deserved_round_size(per_day) if known else None,
        "round_size": round_size,
    }
