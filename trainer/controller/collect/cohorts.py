"""Cohorts: singles with the same system prompt and tools, of one task family, that are compared with each other.

For families whose running baseline is too young: the mean of the others is then what each member is compared with.
Their tasks differ, so that a judge must score each by itself. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from hashlib import blake2b

from ratchet.store.records import Trajectory
from ratchet.trainer.controller.collect.grouping import PlannedGroup, sealed_at

_KEY = "cohort"  # begins a cohort's key, where a group's says which task it is of


def likeness(run: Trajectory, system_prompt: bytes) -> str:
    """Return what singles of one cohort have in common; also the key of their group. `system_prompt` is its digest."""
    said = blake2b(run.tools_hash.encode() + system_prompt, digest_size=8).hexdigest()
    return f"{_KEY}:{run.family}:{said}"


def plan_cohorts(
    alone: Sequence[Trajectory],
    *,
    keys: Mapping[str, str],
    settled: Set[str],
    size: int,
    least: int,
    wait_seconds: float,
    now: float,
) -> tuple[list[PlannedGroup], set[str]]:
    """Return the cohorts of those that found no company, and the ids of those that go on waiting for one.

    `keys` has the likeness of each; `settled` are the families that have a running baseline: theirs need no cohort. A
    cohort smaller than `size` forms once its oldest has been complete for `wait_seconds`; fewer than `least` form none.
    """
    likes: dict[tuple[str, str], list[Trajectory]] = {}
    for run in alone:
        if run.family not in settled:
            likes.setdefault((run.alias, keys[run.id]), []).append(run)
    groups: list[PlannedGroup] = []
    waiting: set[str] = set()
    for (alias, key), runs in likes.items():
        runs.sort(key=lambda run: (sealed_at(run), run.id))
        whole = len(runs) - len(runs) % size
        parts = [runs[start : start + size] for start in range(0, whole, size)]
        rest = runs[whole:]
        if rest and now - sealed_at(rest[0]) < wait_seconds:
            waiting |= {run.id for run in rest}
        elif len(rest) >= least:
            parts.append(rest)
        groups += [PlannedGroup(key, alias, tuple(run.id for run in part)) for part in parts]
    return groups, waiting
