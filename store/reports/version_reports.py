"""Reports on versions: which serve, which are undecided, and which could not be proven."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ratchet.store.policies.serving import shares_in_force
from ratchet.store.records import BASE_VERSION
from ratchet.store.states import SERVING, PolicyAction, PolicyState

if TYPE_CHECKING:
    from ratchet.store.records import Decision, Policy
    from ratchet.store.store import Store


def list_versions(store: Store, alias: str | None = None) -> list[tuple[Policy, Decision | None, bool]]:
    """Return the versions, oldest first, each with its newest decision, and whether its data was deleted."""
    decided = store.decisions.latest(alias)
    learnt = {(one.alias, one.version) for one in store.deletions.versions_with_deleted_data()}
    named = [((policy.alias, policy.version), policy) for policy in store.policies.all(alias)]
    return [(policy, decided.get(name), name in learnt) for name, policy in named]


# Which versions of an agent serve, and what is known about the release: for `ratchet status`, the API and the console.
#
# The figures are those that the release controller recorded last; docs/release.md explains them.


def read_release(store: Store, alias: str) -> dict[str, Any] | None:
    """Return the versions that serve with their roles and shares, the anchor, a pin, and the controller's figures.

    None without a live version. `figures` is None before the controller has recorded any.
    """
    serving = store.policies.serving_of(alias)
    if serving.live is None or serving.anchor is None:
        return None
    shares = shares_in_force(filter(None, serving))
    recorded = {one.version: one for one in store.releases.evidence(alias)}
    newest = (serving.ramp and recorded.get(serving.ramp.version)) or recorded.get(serving.live.version)
    return {
        "alias": alias,
        "serving": [
            {"version": one.version, "role": str(role), "share": shares[one.version], "created_at": one.created_at}
            for role, one in zip(SERVING, serving, strict=True)
            if one is not None
        ],
        "anchor": serving.anchor.version,
        "pinned": _pin(store, alias, serving.live.version) if serving.live.pinned_at is not None else None,
        "figures": dict(newest.evidence) | {"version": newest.version, "at": newest.updated_at} if newest else None,
    }


def describe_release(release: Mapping[str, Any], *, unprotected: bool = False) -> list[str]:
    """Return it as lines of text, each with its heading; `unprotected`: versions become live without a ramp."""
    alias, figures = release["alias"], release["figures"]
    served = ", ".join(f"@{one['version']} {one['role']} {one['share']:.0%}" for one in release["serving"])
    lines = [f"serving       {served}; the anchor is @{release['anchor']}"]
    if pin := release["pinned"]:
        lines.append(f"PINNED        by {pin['by']}: {pin['reason']}; `ratchet policies unpin {alias}` ends it")
    if unprotected:
        lines.append(
            "UNPROTECTED   trainer.release.policy is immediate: a proven version serves all new trajectories at once, "
            "and nothing takes a worse one back"
        )
    elif figures is not None:
        lines += _figures(release, figures)
    return lines


def _figures(release: Mapping[str, Any], figures: Mapping[str, Any]) -> list[str]:
    lines = []
    ramp = next((one["version"] for one in release["serving"] if one["role"] == "ramp"), None)
    if ramp is not None and ramp == figures["version"]:
        lines.append(
            f"evidence      @{ramp}: {figures.get('counted', 0)} of {figures.get('ramp_length', 0)} trajectories of "
            f"its ramp are counted; evidence of harm {figures.get('harm', 1.0):.3g}, of {figures.get('enough', 0):g} "
            "that roll it back"
        )
    if status := figures.get("status"):
        lines.append(f"release       {status}")
    if gain := figures.get("live_minus_anchor"):
        lines.append(
            f"live - anchor {gain['value']:+.3f} ({gain['low']:+.3f} to {gain['high']:+.3f}, at all times 95%), "
            f"{gain['count']} trajectories since @{release['anchor']} became the anchor"
        )
    if losses := figures.get("detectable"):
        found = ", ".join(f"{loss:.2f} in a {period}" for period, loss in losses.items() if loss <= 1.0)
        lines.append(
            f"finds         {f'a loss of {found}' if found else 'no loss below 1.00 in a month'}, in the median, at "
            f"{figures.get('per_day', 0.0):,.0f} scored trajectories a day"
        )
    if figures.get("traffic_too_small"):
        lines.append(
            "TRAFFIC       is too small: a loss of 0.1 takes more than a month to be found; let held-out tasks decide "
            "(trainer.release.held_out_share, or workflow and tasks)"
        )
    deserved, size = figures.get("deserved_round_size"), figures.get("round_size")
    if deserved and size:
        lines.append(f"round size    {_round_size(size, deserved)}")
    return lines


def _round_size(size: int, deserved: int) -> str:
    if deserved / 2 <= size <= 2 * deserved:
        return f"{size} trajectories (trainer.groups_per_round); about {deserved} would suit this traffic"
    remedy = "trainer.groups_per_round"
    if size < deserved:
        remedy += ", and round_wait_seconds so that a round can fill"
    return f"{size} trajectories; about {deserved} would suit this traffic ({remedy})"


def _pin(store: Store, alias: str, version: int) -> dict[str, Any] | None:
    found = store.decisions.decisions_of(alias, version)
    newest = next((one for one in found if one.action is PolicyAction.PIN), None)
    return None if newest is None else {"by": newest.decided_by, "reason": newest.reason, "at": newest.decided_at}


# Undecided versions: the scores of the one in its ramp beside the live one's, and the one that awaits approval.


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


# Unproven versions: they serve nobody because their proof could not decide; how many there are, why, and what helps.
#
# The alarm, `ratchet status` and the learning report say it in the same words.

REMEDY = (
    "let vLLM and the learner compute in one number format (vllm.dtype, learner.dtype) and from the same base model, "
    "and restart a replica that serves another adapter"
)


@dataclass(frozen=True, slots=True)
class UnprovenVersions:
    """The unproven versions of an alias that are newer than its live one, and the proof's reason for the newest."""

    alias: str
    versions: tuple[int, ...]  # oldest first
    live: int
    reason: str

    def describe(self) -> str:
        """Return their number, the reason and the remedies."""
        count, newest = len(self.versions), f"{self.alias}@{self.versions[-1]}"
        named = f"{newest} serves nobody" if count == 1 else f"@{self.versions[0]} to {newest} serve nobody"
        return (
            f"{count} version{'s' * (count > 1)} unproven: {self.reason}; {named}, and training waits once "
            f"trainer.max_staleness versions are ahead of the live one. To mend it, {REMEDY}; `ratchet doctor` "
            f"compares both sides. `ratchet policies promote {newest} --reason WHY` releases it without a proof, "
            f"`ratchet policies rollback {self.alias}@{self.live} --reason WHY` discards what was trained since"
        )


def read_unproven(store: Store, alias: str) -> UnprovenVersions | None:
    """Return the unproven versions of an alias; None if there are none."""
    found = store.policies.list_unproven(alias)
    if not found:
        return None
    decisions = store.decisions.decisions_of(alias, found[-1].version)
    reason = next((one.reason for one in decisions if one.action is PolicyAction.UNPROVEN), "no reason is recorded")
    live = store.policies.live().get(alias)
    return UnprovenVersions(
        alias, tuple(policy.version for policy in found), live.version if live is not None else BASE_VERSION, reason
    )
