"""Holding: a version waits for a person, with the evidence on record and an alarm that says how to decide.

What is held is a canary, or a candidate where the gate is off; its state stays as it is. While one is held nothing is
trained and nothing else is published.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ratchet.store.records import Policy
from ratchet.store.store import Store
from ratchet.trainer.observability.finding import Finding
from ratchet.trainer.release.candidates import name_of

log = logging.getLogger(__name__)

GetBlockingFindings = Callable[[], Sequence[Finding]]  # what the sentinel says against promoting anything now


def no_blocking_findings() -> Sequence[Finding]:
    """Where nobody watches."""
    return ()


def hold(store: Store, policy: Policy, reason: str, evidence: Mapping[str, Any], *, by: str) -> None:
    """Write down that only a person promotes this version, and raise the alarm."""
    store.policies.hold(policy.alias, policy.version, evidence, by=by, reason=reason)
    take_back = f"`ratchet policies rollback {policy.alias} --reason WHY`"
    remedy = f"`ratchet policies promote {name_of(policy)} --reason WHY` or {take_back}"
    store.alarms.raise_(f"held:{policy.alias}", f"{name_of(policy)} waits for a person: {reason}; {remedy}")
    log.warning("event=policy_held policy=%s reason=%r", name_of(policy), reason)


def release(store: Store, alias: str) -> None:
    """Clear the alarm: nothing is held any more."""
    store.alarms.clear(f"held:{alias}")


def objection(doubts: Sequence[Finding]) -> str | None:
    """Return why nothing is promoted now; None where the sentinel has no doubts."""
    told = "; ".join(found.reason for found in doubts if found.reason)
    return f"the sentinel doubts the judge: {told}" if told else None


def findings_evidence(doubts: Sequence[Finding]) -> dict[str, Any]:
    """Return doubts as a decision keeps them."""
    return {"sentinel": [asdict(found) for found in doubts]} if doubts else {}
