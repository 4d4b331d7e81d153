"""How many open trajectories hold each version: those with a call under way, or active a short while ago.

A running count: a call costs a few steps, a question only as many as trajectories have gone still since the last one,
so that it stalls nothing, however many are open. All state belongs to the event loop's thread; time is a parameter.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Protocol


class PinnedTrajectory(Protocol):
    """A trajectory that holds a version. Neither alias nor version ever changes."""

    alias: str
    version: int
    last_active_at: float
    open_calls: int


class VersionPins:
    """The trajectories that hold their version."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, PinnedTrajectory] = OrderedDict()  # the stillest first, but for those under way
        self._counts: Counter[str] = Counter()

    def touch(self, trajectory_id: str, holder: PinnedTrajectory) -> None:
        """A trajectory was active now."""
        if trajectory_id not in self._held:
            self._held[trajectory_id] = holder
            self._counts[_policy(holder)] += 1
        self._held.move_to_end(trajectory_id)

    def forget(self, trajectory_id: str) -> None:
        """A trajectory holds nothing any more."""
        holder = self._held.pop(trajectory_id, None)
        if holder is not None:
            self._counts[_policy(holder)] -= 1

    def counts(self, now: float, idle_seconds: float) -> dict[str, int]:
        """Return how many hold each `alias@version`: active within `idle_seconds`, or with a call under way."""
        for trajectory_id, holder in self._still(now - idle_seconds):
            if holder.open_calls:
                self._held.move_to_end(trajectory_id)
            else:
                self.forget(trajectory_id)
        return {policy: count for policy, count in self._counts.items() if count}

    def _still(self, before: float) -> list[tuple[str, PinnedTrajectory]]:
        """Return the first ones that were not active since."""
        found = []
        for trajectory_id, holder in self._held.items():
            if holder.last_active_at > before:
                break
            found.append((trajectory_id, holder))
        return found


def _policy(holder: PinnedTrajectory) -> str:
    return f"{holder.alias}@{holder.version}"
