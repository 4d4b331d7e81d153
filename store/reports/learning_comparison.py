"""The records of the learning report: two sides that are compared, and the difference of their means."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Side:
    """One side of the comparison: the versions, how many trajectories, their mean score."""

    first_version: int
    last_version: int
    count: int
    mean: float


@dataclass(frozen=True, slots=True)
class Gain:
    """A difference of means with its 95% interval; `count` is what it was made of (trajectories, or tasks)."""

    value: float
    low: float
    high: float
    count: int

    @property
    def verdict(self) -> str:
        """better, worse, or unknown where the interval holds zero."""
        return "better" if self.low > 0 else "worse" if self.high < 0 else "unknown"


@dataclass(frozen=True, slots=True)
class FamilyReport:
    """One task family, or all of them. `same_tasks` is None if no task came under both sides."""

    family: str
    before: Side
    after: Side
    gain: Gain
    same_tasks: Gain | None
    more_scores: int | None  # of the newest versions that would decide; None if it is decided, or none would


@dataclass(frozen=True, slots=True)
class VersionScore:
    """The mean score of one version's traffic with its 95% interval; of one score alone that is all it can be."""

    version: int
    count: int
    mean: float
    low: float
    high: float
