"""Which versions of an agent serve, and what is known about the release: for `ratchet status`, the API and the console.

The figures are those that the release controller recorded last; docs/release.md explains them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ratchet.store.policies.shares import shares_in_force
from ratchet.store.states import SERVING, PolicyAction

if TYPE_CHECKING:
    from ratchet.store.store import Store


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
