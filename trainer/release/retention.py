"""Which versions keep their folder, and which of those keep what training goes on from. Pure.

Kept: what serves or may serve soon (live, canary, candidate), what a trajectory is pinned to, where training goes on,
the newest ones and the best ones. The optimiser's state, most of a folder's bytes, stays only with the newest and the
best. Everything else goes from the disk; its row in the store stays.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from statistics import fmean

from ratchet.store.records import BASE_VERSION, PastScore, Policy
from ratchet.store.states import PolicyState

_SERVING = (PolicyState.LIVE, PolicyState.CANARY, PolicyState.CANDIDATE)
_LEAST = 16  # scores that make a version comparable


@dataclass(frozen=True, slots=True)
class Retention:
    """Version numbers: those whose folder stays, and those of them whose learner state stays."""

    folders: Set[int]
    states: Set[int]


def retained(
    policies: Sequence[Policy], *, pinned: Collection[int], best: Sequence[int], newest: int, states: int
) -> Retention:
    """Say what stays: `newest` versions with their folder, `states` of them with their state; `best`, best first."""
    versions = sorted((policy.version for policy in policies if policy.version != BASE_VERSION), reverse=True)
    serving = {policy.version for policy in policies if policy.state in _SERVING}
    # Training goes on from the newest that is not rejected, which may be unproven, or, after a roll back, the live one.
    goes_on = [policy.version for policy in policies if policy.state is not PolicyState.REJECTED and policy.round_id]
    with_state = {*versions[:states], *best[:states], *serving, *goes_on[-1:]}
    kept = {*versions[:newest], *serving, *pinned, *with_state}
    return Retention(folders=_sharing(policies, kept), states=_sharing(policies, with_state))


def _sharing(policies: Sequence[Policy], versions: Set[int]) -> Set[int]:
    """Return these versions and those that share a folder with one: they differ by their prompt alone."""
    folders = {policy.adapter for policy in policies if policy.version in versions and policy.adapter}
    return {*versions, *(policy.version for policy in policies if policy.adapter in folders)}


def best_first(scores: Sequence[PastScore]) -> list[int]:
    """Return the trained versions by the mean score of their trajectories; those with too few scores are left out.

    Not for a judge that only ranks: its means do not tell versions apart.
    """
    by_version: dict[int, list[float]] = {}
    for scored in scores:
        if scored.version != BASE_VERSION:
            by_version.setdefault(scored.version, []).append(scored.score)
    means: Mapping[int, float] = {
        version: fmean(found) for version, found in by_version.items() if len(found) >= _LEAST
    }
    return sorted(means, key=lambda version: (means[version], version), reverse=True)
