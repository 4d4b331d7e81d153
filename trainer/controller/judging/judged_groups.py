"""Caches between the judge and the training round. Both are bounded, and the store always decides.

`TranscriptCache` spares the round a second read of a trajectory, `JudgedGroupCache` a second computation of advantages.
Both return what the store holds now: an entry that the store has overtaken is read or computed again. The judge's
groups are put in by one thread while a round takes its own out in another.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ratchet.store.records import Group, Trajectory, Transcript, Verdict
from ratchet.store.store import Store
from ratchet.trainer.controller.advantages.estimator import AdvantageEstimator
from ratchet.trainer.controller.advantages.judged_group import JudgedGroup

_SCORED = ("score", "components", "baseline_mean", "baseline_std")  # fields of a verdict that advantages depend on


class TranscriptCache:
    """The transcripts of one alias that the judge has received and no round has used yet, at most `max_entries`."""

    def __init__(
        self, store: Store, max_entries: int = 512, on_read: Callable[[Transcript], None] | None = None
    ) -> None:
        """`on_read` is called with what was read for the judge."""
        self._store = store
        self._max_entries = max_entries
        self._on_read = on_read
        self._entries: dict[str, Transcript] = {}
        self._lock = threading.Lock()

    def read(self, trajectory_id: str) -> Transcript:
        """Read a trajectory for the judge and keep it for the round."""
        transcript = self._store.trajectories.read(trajectory_id)
        with self._lock:
            _evict(self._entries, self._max_entries)
            self._entries[trajectory_id] = transcript
        if self._on_read is not None:
            self._on_read(transcript)
        return transcript

    def pop(self, trajectory_ids: Sequence[str]) -> list[Transcript]:
        """Return the current transcripts, in order, and forget them."""
        active = self._store.trajectories.last_active(trajectory_ids)
        return [self._pop(name, active.get(name)) for name in trajectory_ids]

    def _pop(self, trajectory_id: str, last_active_at: float | None) -> Transcript:
        with self._lock:
            entry = self._entries.pop(trajectory_id, None)
        if entry is not None and entry.trajectory.last_active_at == last_active_at:
            return entry
        return self._store.trajectories.read(trajectory_id)


class JudgedGroupCache:
    """The judged groups of one alias that no round has used yet, at most `max_entries`."""

    def __init__(self, store: Store, estimator: AdvantageEstimator, max_entries: int = 1024) -> None:
        self.estimator = estimator
        self._store = store
        self._max_entries = max_entries
        self._entries: dict[str, JudgedGroup] = {}
        self._lock = threading.Lock()

    def estimate(self, group: Group, members: Sequence[Trajectory], verdicts: Sequence[Verdict]) -> JudgedGroup:
        """Return a judged group with its advantages, and keep it for the round."""
        judged = self.estimator.estimate(group, members, verdicts)
        with self._lock:
            _evict(self._entries, self._max_entries)
            self._entries[group.id] = judged
        return judged

    def pop(self, groups: Sequence[Group], members: Mapping[str, Trajectory]) -> list[JudgedGroup]:
        """Return the groups of a round with their current verdicts, in order, and forget them.

        `members` holds the trajectories of all groups by id. Advantages are computed again only if a member or a score
        has changed since, or after a restart.
        """
        current = self._store.groups.verdicts([name for group in groups for name in group.members])
        return [
            self._pop(group, [members[name] for name in group.members], [current[name] for name in group.members])
            for group in groups
        ]

    def _pop(self, group: Group, members: Sequence[Trajectory], verdicts: Sequence[Verdict]) -> JudgedGroup:
        with self._lock:
            entry = self._entries.pop(group.id, None)
        if entry is None or _scored(entry.verdicts) != _scored(verdicts):
            return self.estimator.estimate(group, members, verdicts)
        return dataclasses.replace(entry, group=group, members=tuple(members), verdicts=tuple(verdicts))


def _scored(verdicts: Sequence[Verdict]) -> list[tuple[object, ...]]:
    return [(one.trajectory_id, *(getattr(one, name) for name in _SCORED)) for one in verdicts]


def _evict(entries: dict[str, Any], max_entries: int) -> None:
    """Remove the oldest entries until one more fits."""
    while len(entries) >= max_entries:
        del entries[next(iter(entries))]
