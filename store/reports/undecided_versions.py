"""What stands undecided: the scores of a canary and of the live version beside it, and what waits for a person."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ratchet.store.states import PolicyAction, PolicyState

if TYPE_CHECKING:
    from ratchet.store.store import Store


def read_canary_scores(store: Store, alias: str) -> dict[str, Any] | None:
    """Return what the canary of an alias and the live version beside it have scored; None without a canary."""
    serving = {policy.state: policy for policy in store.policies.serving() if policy.alias == alias}
    canary, live = serving.get(PolicyState.CANARY), serving.get(PolicyState.LIVE)
    if canary is None or live is None:
        return None
    told = store.decisions.decisions_of(alias, canary.version)
    since = min((one.decided_at for one in told if one.action is PolicyAction.CANARY), default=canary.created_at)
    judge = store.groups.newest_judge_version(alias) or ""
    sides = {"canary": (canary.version, 0.0), "live": (live.version, since)}
    content: dict[str, Any] = {"version": canary.version, "share": canary.canary_share}
    content["held"] = bool(told) and told[0].action is PolicyAction.HOLD
    for side, (version, after) in sides.items():
        scores = [one.score for one in store.groups.rewards(alias, judge, version, after)]
        content[side] = {"count": len(scores), "mean": sum(scores) / len(scores) if scores else None}
    return content


def read_awaiting_approval(store: Store, alias: str) -> dict[str, Any] | None:
    """Return the version of an alias that waits for a person, and why; None if none does."""
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
