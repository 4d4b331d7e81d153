"""Transcripts between the judge and the round: read once, unless the trajectory has gone on meanwhile.

Promises that a round sees what the store holds now; what is kept only spares a second read. Bounded: the oldest go
first, and are then read again.
"""

from __future__ import annotations

from collections.abc import Sequence

from ratchet.store.records import Transcript
from ratchet.store.store import Store


class Transcripts:
    """The transcripts of one alias that the judge was given and no round has taken yet, at most `most` of them."""

    def __init__(self, store: Store, most: int = 512) -> None:
        self._store = store
        self._most = most
        self._kept: dict[str, Transcript] = {}

    def read(self, name: str) -> Transcript:
        """Read a trajectory for the judge, and keep it for the round."""
        while len(self._kept) >= self._most:
            del self._kept[next(iter(self._kept))]
        transcript = self._store.trajectories.read(name)
        self._kept[name] = transcript
        return transcript

    def take(self, names: Sequence[str]) -> list[Transcript]:
        """Return the trajectories as they are now, in order, and keep them no longer."""
        active = self._store.trajectories.last_active(names)
        return [self._taken(name, active.get(name)) for name in names]

    def _taken(self, name: str, last_active_at: float | None) -> Transcript:
        kept = self._kept.pop(name, None)
        if kept is not None and kept.trajectory.last_active_at == last_active_at:
            return kept
        return self._store.trajectories.read(name)
