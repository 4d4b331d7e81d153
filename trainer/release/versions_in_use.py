"""Versions that somebody still needs although they serve no new traffic: trajectories under way, and comparisons."""

from __future__ import annotations

from ratchet.store.coordination.proxies import PROXY_TIMEOUT_SECONDS
from ratchet.store.store import Store

_COMPARED_WITHIN = 3600.0  # seconds that a version is kept for a rollout that was planned on it and has not ended


def versions_in_use(store: Store, alias: str, now: float) -> set[int]:
    """Return the versions that a instance has trajectories pinned to, or that rollouts of the tuner wait for."""
    instances = store.proxy_instances.running(alias, now - PROXY_TIMEOUT_SECONDS)
    pins = [
        name.rpartition("@") for instance in instances for name, count in instance.pinned_trajectories.items() if count
    ]
    pinned = {int(version) for name, _, version in pins if name == alias}
    return pinned | store.rollouts.awaited(alias, now - _COMPARED_WITHIN)
