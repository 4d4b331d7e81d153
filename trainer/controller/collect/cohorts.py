"""Cohorts: ungrouped trajectories of one task family, system prompt and tools that are compared with each other. Pure.

For families whose running baseline has too few scores: each member is compared with the mean of the others. Their tasks
differ, so the judge must score each member by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from hashlib import blake2b

from ratchet.store.records import Trajectory
from ratchet.trainer.controller.collect.grouping import PlannedGroup, sealed_at

_PREFIX = "cohort"  # of a cohort's key; the key of a group names its task


def cohort_key(trajectory: Trajectory, system_prompt_digest: bytes) -> str:
    """Return the key that the trajectories of one cohort share; also the key of their group."""
    digest = blake2b(trajectory.tools_hash.encode() + system_prompt_digest, digest_size=8).hexdigest()
    return f"{_PREFIX}:{trajectory.family}:{digest}"


def plan_cohorts(
    ungrouped: Sequence[Trajectory],
    *,
    keys: Mapping[str, str],
    with_baseline: Set[str],
    size: int,
    min_size: int,
    wait_seconds: float,
    now: float,
) -> tuple[list[PlannedGroup], set[str]]:
    """Return the cohorts of ungrouped trajectories, and the ids of those that wait for one.

    `keys` holds the cohort key of each; families in `with_baseline` need no cohort. A cohort of fewer than `size` forms
    once its oldest member has been sealed for `wait_seconds`; fewer than `min_size` form none.
    """
    by_key: dict[tuple[str, str], list[Trajectory]] = {}
    for one in ungrouped:
        if one.family not in with_baseline:
            by_key.setdefault((one.alias, keys[one.id]), []).append(one)
    groups: list[PlannedGroup] = []
    waiting: set[str] = set()
    for (alias, key), found in by_key.items():
        found.sort(key=lambda one: (sealed_at(one), one.id))
        full = len(found) - len(found) % size
        parts = [found[start : start + size] for start in range(0, full, size)]
        rest = found[full:]
        if rest and now - sealed_at(rest[0]) < wait_seconds:
            waiting |= {one.id for one in rest}
        elif len(rest) >= min_size:
            parts.append(rest)
        groups += [PlannedGroup(key, alias, tuple(one.id for one in part)) for part in parts]
    return groups, waiting
