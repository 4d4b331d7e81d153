"""Which trajectories are compared with each other: cohorts, and the plan of groups. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from hashlib import blake2b

from ratchet.store.reasons import DropReason
from ratchet.store.records import MOVED, UNLINKED, Trajectory

# Cohorts: ungrouped trajectories of one task family, system prompt and tools that are compared with each other. Pure.
#
# For families whose running baseline has too few scores: each member is compared with the mean of the others. Their
# tasks differ, so the judge must score each member by itself.

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


# Grouping: which sealed trajectories are compared with each other, and which are dropped. Pure.
#
# Attempts at the same task under the same alias form groups, in the order in which they began; versions may differ
# within a group. Membership does not depend on how long an attempt took: quick attempts that are compared only with
# quick ones would get a baseline of their own. A group therefore waits for members that are under way, unless one takes
# far longer than the others did.

_MAX_DURATION_FACTOR = 4.0  # times the longest sealed attempt, plus wait_seconds: no longer is an attempt waited for


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """A group to form: its key, its alias and its members' ids."""

    key: str
    alias: str
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GroupingPlan:
    """What to do with the sealed trajectories; those that it does not name continue to wait."""

    groups: tuple[PlannedGroup, ...]
    drops: tuple[tuple[str, DropReason], ...]  # by trajectory id
    ungrouped: tuple[Trajectory, ...] = ()  # no peers in time

    def with_ungrouped(self, *, keep: bool, waiting: Set[str] = frozenset()) -> GroupingPlan:
        """Return the plan without its ungrouped trajectories, except those in `waiting`, which wait on.

        If `keep`, each becomes a group of one, to be compared with earlier scores; otherwise they are dropped.
        """
        left = [one for one in self.ungrouped if one.id not in waiting]
        if keep:
            groups_of_one = tuple(PlannedGroup(one.group_key, one.alias, (one.id,)) for one in left)
            return GroupingPlan(self.groups + groups_of_one, self.drops)
        return GroupingPlan(self.groups, self.drops + tuple((one.id, DropReason.UNGROUPED) for one in left))


def plan_groups(
    sealed: Sequence[Trajectory],
    *,
    size: int,
    min_size: int,
    wait_seconds: float,
    now: float,
    abandoned: Set[str] = frozenset(),
    cut_off: Set[str] = frozenset(),
    without_feedback: Set[str] = frozenset(),
    judgeable_at: Mapping[str, float] | None = None,
    held_out: Set[str] = frozenset(),
    other_role: Set[str] = frozenset(),
    under_way: Sequence[Trajectory] = (),
) -> GroupingPlan:
    """Return full groups of `size`, smaller ones that waited long enough, the drops, and the ungrouped trajectories.

    The sets hold the ids of trajectories to drop, by reason. `judgeable_at` is when a trajectory's feedback arrived, if
    after its sealing. `under_way` are attempts that are not sealed yet.
    """
    dropped = _drop_reasons(
        (frozenset(one.id for one in sealed if one.purpose == MOVED), DropReason.MOVED),
        (frozenset(one.id for one in sealed if one.purpose == UNLINKED), DropReason.UNLINKED),
        (frozenset(one.id for one in sealed if one.purpose != "live"), DropReason.EVAL),
        (abandoned, DropReason.ABANDONED),
        (cut_off, DropReason.CUT_OFF),
        (without_feedback, DropReason.NO_FEEDBACK),
        (held_out, DropReason.HELD_OUT),
        (other_role, DropReason.OTHER_ROLE),
    )
    by_task: dict[tuple[str, str], list[Trajectory]] = {}
    for one in sealed:
        if one.id not in dropped:
            by_task.setdefault((one.alias, one.group_key), []).append(one)
    since = {one.id: max(sealed_at(one), (judgeable_at or {}).get(one.id, 0.0)) for one in sealed}
    groups: list[PlannedGroup] = []
    ungrouped: list[Trajectory] = []
    for (alias, key), found in by_task.items():
        limit = wait_seconds + _MAX_DURATION_FACTOR * max(one.last_active_at - one.opened_at for one in found)
        expected = [
            one
            for one in under_way
            if (one.alias, one.group_key) == (alias, key) and one.id not in since and now - one.opened_at <= limit
        ]
        queue = sorted([*found, *expected], key=lambda one: (one.opened_at, one.id))
        for part in (queue[start : start + size] for start in range(0, len(queue), size)):
            if any(one.id not in since for one in part):  # some are under way
                continue
            if len(part) < size and now - min(since[one.id] for one in part) < wait_seconds:
                continue
            if len(part) >= min_size:
                groups.append(PlannedGroup(key, alias, tuple(one.id for one in part)))
            else:
                ungrouped.extend(part)
    drops = tuple((one.id, dropped[one.id]) for one in sealed if one.id in dropped)
    return GroupingPlan(tuple(groups), drops, tuple(ungrouped))


def sealed_at(trajectory: Trajectory) -> float:
    """Return when a trajectory was complete (Unix seconds)."""
    return trajectory.last_active_at if trajectory.sealed_at is None else trajectory.sealed_at


def _drop_reasons(*reasons: tuple[Set[str], DropReason]) -> dict[str, DropReason]:
    """Return the reason for each id; the first one that applies."""
    found: dict[str, DropReason] = {}
    for names, reason in reasons:
        found = dict.fromkeys(names, reason) | found
    return found
