"""Approval: a version waits for a person, with the evidence in the store and an alarm that names the commands.

The version is in its ramp or still a candidate; its state does not change. While one waits, nothing else is published;
training goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ratchet.store.records import Policy
from ratchet.store.store import Store
from ratchet.trainer.observability.finding import Finding
from ratchet.trainer.release.candidates import version_name

log = logging.getLogger(__name__)

GetBlockingFindings = Callable[[], Sequence[Finding]]  # the sentinel's findings that block a promotion now


def no_blocking_findings() -> Sequence[Finding]:
    """Return nothing: the default without a sentinel."""
    return ()


def require_approval(store: Store, policy: Policy, reason: str, evidence: Mapping[str, Any], *, by: str) -> None:
    """Record that only a person may promote this version, and raise the alarm."""
    store.policies.require_approval(policy.alias, policy.version, evidence, by=by, reason=reason)
    name = version_name(policy)
    remedy = (
        f"`ratchet policies promote {name} --reason WHY` or `ratchet policies rollback {policy.alias} --reason WHY`"
    )
    store.alarms.raise_(_alarm(policy.alias), f"{name} needs approval: {reason}; {remedy}")
    log.warning("event=approval_required policy=%s reason=%r", name, reason)


def clear_approval_alarm(store: Store, alias: str) -> None:
    """Clear the alarm: no version waits for approval any more."""
    store.alarms.clear(_alarm(alias))


def blocking_reason(findings: Sequence[Finding]) -> str | None:
    """Return why nothing may be promoted now; None if no finding gives a reason."""
    reasons = "; ".join(finding.reason for finding in findings if finding.reason)
    return f"the sentinel found that the judges disagree: {reasons}" if reasons else None


def findings_evidence(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return findings in the form of a decision's evidence."""
    return {"sentinel": [asdict(finding) for finding in findings]} if findings else {}


def _alarm(alias: str) -> str:
    return f"approval_required:{alias}"
