"""Monitors: what the store says of training, written for tools that draw it.

A monitor is a projection of the store: it is fed from what is committed there and from nothing else, so that it can be
written again at any time (`ratchet status --tensorboard`). It never holds training up and never fails it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Monitor", "Point"]


@dataclass(frozen=True, slots=True)
class Point:
    """One thing that happened to a version: its round was committed, or something was decided about it.

    values  numbers by name, such as `round/reward`; a name's parts are separated by `/`
    note    one sentence, where there is more to say than numbers
    """

    version: int
    at: float  # Unix seconds
    values: Mapping[str, float]
    note: str | None = None


class Monitor(Protocol):
    """Something that points are written to."""

    def write(self, points: Sequence[Point]) -> None:
        """Write points, oldest first, so that they are there when this returns."""

    def close(self) -> None:
        """Nothing more is written."""
