"""The records of the learning report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison: its versions, number of trajectories and mean score."""

    first_version: int
    last_version: int
    count: int
    mean: float


@dataclass(frozen=True, slots=True)
class Gain:
    """A difference of means with its 95% interval over `count` trajectories or tasks."""

    value: float
    low: float
    high: float
    count: int

    @property
    def verdict(self) -> str:
        """`better`, `worse`, or `unknown` if the interval contains zero."""
        return "better" if self.low > 0 else "worse" if self.high < 0 else "unknown"


@dataclass(frozen=True, slots=True)
class FamilyReport:
    """The comparison of one task family, or of all. `same_tasks` None: no task is on both sides."""

    family: str
    before: Side
    after: Side
    gain: Gain
    same_tasks: Gain | None
    more_scores: int | None  # of the newest versions, to decide; None: decided, or impossible


@dataclass(frozen=True, slots=True)
class VersionScore:
    """The mean score of a version's traffic with its 95% interval; for one score, the whole range."""

    version: int
    count: int
    mean: float
    low: float
    high: float
