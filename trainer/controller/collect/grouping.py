"""Grouping: which sealed trajectories are compared with each other, and which are put aside.

A pure function of the waiting trajectories, those that are under way, and the time. Attempts at the same task under the
same alias belong together, in the order in which they began; versions may differ within a group. Who is in a group does
not depend on how long anyone took: quick attempts compared with quick ones would have a baseline of their own. A group
therefore waits for the members that are under way, but for none that takes far longer than the others did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from ratchet.store.reasons import DropReason
from ratchet.store.records import Trajectory

_TIMES_LONGER = 4.0  # than the longest attempt that is complete: beyond that, and wait_seconds, none is waited for


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """A group to be formed: its key, its alias and its members' ids."""

    key: str
    alias: str
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GroupingPlan:
    """What to do with the waiting trajectories; those that it does not name go on waiting."""

    groups: tuple[PlannedGroup, ...]
    drops: tuple[tuple[str, str], ...]  # (trajectory id, reason)
    alone: tuple[Trajectory, ...] = ()  # found no company in time

    def settled(self, *, singles: bool, waiting: Set[str] = frozenset()) -> GroupingPlan:
        """Return the plan with those that found no company put aside; but for those that are `waiting` for some.

        With `singles` they become groups of one, to be compared with what came before them.
        """
        left = [run for run in self.alone if run.id not in waiting]
        if singles:
            ones = tuple(PlannedGroup(run.group_key, run.alias, (run.id,)) for run in left)
            return GroupingPlan(self.groups + ones, self.drops)
        return GroupingPlan(self.groups, self.drops + tuple((run.id, DropReason.UNGROUPED) for run in left))


def plan_groups(
    waiting: Sequence[Trajectory],
    *,
    size: int,
    least: int,
    wait_seconds: float,
    now: float,
    abandoned: Set[str] = frozenset(),
    cut_off: Set[str] = frozenset(),
    silent: Set[str] = frozenset(),
    ripe_at: Mapping[str, float] | None = None,
    held_out: Set[str] = frozenset(),
    other_role: Set[str] = frozenset(),
    under_way: Sequence[Trajectory] = (),
) -> GroupingPlan:
    """Return the groups of `size` that are complete, smaller ones that waited long enough, the drops, and the lonely.

    `abandoned` holds the ids of those whose rollout is, `cut_off` of those whose last call was ended by a machine,
    `silent` of those that nobody spoke of, `held_out` of those whose task is set aside for evaluation, `other_role` of
    those without a role that trains; `ripe_at` is since when one could be judged, where that was after its sealing;
    `under_way` are attempts that are not complete.
    """
    groups: list[PlannedGroup] = []
    alone: list[Trajectory] = []
    measured = {run.id for run in waiting if run.purpose != "live"}
    put_aside: dict[str, str] = {}
    for names, why in (
        (measured, DropReason.EVAL), (abandoned, DropReason.ABANDONED), (cut_off, DropReason.CUT_OFF),
        (silent, DropReason.NO_FEEDBACK),
        (held_out, DropReason.HELD_OUT), (other_role, DropReason.OTHER_ROLE),
    ):  # fmt: skip
        put_aside = dict.fromkeys(names, why) | put_aside
    drops = [(run.id, put_aside[run.id]) for run in waiting if run.id in put_aside]
    buckets: dict[tuple[str, str], list[Trajectory]] = {}
    for run in waiting:
        if run.id not in put_aside:
            buckets.setdefault((run.alias, run.group_key), []).append(run)
    since = {run.id: max(sealed_at(run), (ripe_at or {}).get(run.id, 0.0)) for run in waiting}
    for (alias, key), runs in buckets.items():
        longest = max(run.last_active_at - run.opened_at for run in runs)
        awaited = [
            run
            for run in under_way
            if (run.alias, run.group_key) == (alias, key)
            and run.id not in since
            and now - run.opened_at <= wait_seconds + _TIMES_LONGER * longest
        ]
        line = sorted([*runs, *awaited], key=lambda run: (run.opened_at, run.id))
        for part in (line[start : start + size] for start in range(0, len(line), size)):
            if any(run.id not in since for run in part):  # some are under way
                continue
            if len(part) < size and now - min(since[run.id] for run in part) < wait_seconds:
                continue
            if len(part) >= least:
                groups.append(PlannedGroup(key, alias, tuple(run.id for run in part)))
            else:
                alone.extend(part)
    return GroupingPlan(tuple(groups), tuple(drops), tuple(alone))


def sealed_at(run: Trajectory) -> float:
    """Return since when a trajectory is complete (Unix seconds)."""
    return run.last_active_at if run.sealed_at is None else run.sealed_at
