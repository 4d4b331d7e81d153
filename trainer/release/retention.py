"""Retention: the versions whose checkpoint folder stays, and those whose optimizer state stays.

Kept: versions that serve or may serve soon, versions that a trajectory is pinned to, the
version that training continues from, the newest ones and the best ones. The optimizer state, most of a folder's bytes,
stays with the newest and the best ones only. All other folders are deleted; their rows in the store stay.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from statistics import fmean

from ratchet.store.coordination import PROXY_TIMEOUT_SECONDS
from ratchet.store.records import BASE_VERSION, PastScore, Policy
from ratchet.store.states import SERVING, PolicyState
from ratchet.store.store import Store

_KEPT = (*SERVING, PolicyState.CANDIDATE)
_MIN_SCORES = 16  # of a version that is compared with others
_ROLLOUT_TIMEOUT = 3600.0  # seconds that a version is kept for a planned rollout that has not ended


@dataclass(frozen=True, slots=True)
class Retention:
    """Version numbers: those whose folder stays, and those of them whose optimizer state stays."""

    folders: Set[int]
    states: Set[int]


def versions_in_use(store: Store, alias: str, now: float) -> set[int]:
    """Return the versions that a proxy has trajectories pinned to, or that planned rollouts of the tuner need."""
    proxies = store.proxy_instances.running(alias, now - PROXY_TIMEOUT_SECONDS)
    pins = [name.rpartition("@") for proxy in proxies for name, count in proxy.pinned_trajectories.items() if count]
    pinned = {int(version) for name, _, version in pins if name == alias}
    return pinned | store.rollouts.awaited_versions(alias, now - _ROLLOUT_TIMEOUT)


def retained(
    policies: Sequence[Policy], *, pinned: Collection[int], best: Sequence[int], newest: int, states: int
) -> Retention:
    """Return what stays: `newest` versions with their folder, `states` of them with their state; `best`, best first."""
    versions = sorted((policy.version for policy in policies if policy.version != BASE_VERSION), reverse=True)
    serving = {policy.version for policy in policies if policy.state in _KEPT}
    # Training continues from the newest version that is not rejected: it may be unproven, or the live one after a
    # rollback.
    trained = [policy.version for policy in policies if policy.state is not PolicyState.REJECTED and policy.round_id]
    with_state = {*versions[:states], *best[:states], *serving, *trained[-1:]}
    with_folder = {*versions[:newest], *serving, *pinned, *with_state}
    return Retention(folders=_sharing(policies, with_folder), states=_sharing(policies, with_state))


def _sharing(policies: Sequence[Policy], versions: Set[int]) -> Set[int]:
    """Return these versions and those that share a folder with one, that is, differ by their prompt only."""
    folders = {policy.adapter for policy in policies if policy.version in versions and policy.adapter}
    return {*versions, *(policy.version for policy in policies if policy.adapter in folders)}


def best_first(scores: Sequence[PastScore]) -> list[int]:
    """Return the trained versions by the mean score of their trajectories, without those that have too few scores.

    Not for a judge that only ranks: its means do not compare versions.
    """
    by_version: dict[int, list[float]] = {}
    for scored in scores:
        if scored.version != BASE_VERSION:
            by_version.setdefault(scored.version, []).append(scored.score)
    means: Mapping[int, float] = {
        version: fmean(values) for version, values in by_version.items() if len(values) >= _MIN_SCORES
    }
    return sorted(means, key=lambda version: (means[version], version), reverse=True)
