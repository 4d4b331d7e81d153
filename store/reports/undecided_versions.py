"""Undecided versions: the scores of the one in its ramp beside the live one's, and the one that awaits approval."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ratchet.store.states import PolicyAction, PolicyState

if TYPE_CHECKING:
    from ratchet.store.store import Store


def read_ramp_scores(store: Store, alias: str) -> dict[str, Any] | None:
    """Return the scores of the version of an alias that is in its ramp, and of the live one; None without a ramp."""
    serving = {policy.state: policy for policy in store.policies.serving() if policy.alias == alias}
    ramp, live = serving.get(PolicyState.RAMP), serving.get(PolicyState.LIVE)
    if ramp is None or live is None:
        return None
    decisions = store.decisions.decisions_of(alias, ramp.version)
    since = min((one.decided_at for one in decisions if one.action is PolicyAction.RAMP), default=ramp.created_at)
    judge = store.groups.newest_judge_version(alias) or ""
    sides = {"ramp": (ramp.version, 0.0), "live": (live.version, since)}
    content: dict[str, Any] = {"version": ramp.version, "share": ramp.share}
    content["awaiting_approval"] = bool(decisions) and decisions[0].action is PolicyAction.HOLD
    for side, (version, after) in sides.items():
        scores = [one.score for one in store.groups.rewards(alias, judge, version, after)]
        content[side] = {"count": len(scores), "mean": sum(scores) / len(scores) if scores else None}
    return content


def read_awaiting_approval(store: Store, alias: str) -> dict[str, Any] | None:
    """Return the version of an alias that awaits approval, and why; None if none does."""
    policy = store.policies.awaiting_approval(alias)
    if policy is None:
        return None
    newest = store.decisions.decisions_of(alias, policy.version, limit=1)[0]
    return {
        "model": alias,
        "version": policy.version,
        "state": str(policy.state),
        "by": newest.decided_by,
        "reason": newest.reason,
    }
