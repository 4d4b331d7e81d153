"""The frozen records of releases: how a trajectory's version was drawn, what came of it, and a version's evidence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ratchet.store.records.base import Record


class VersionDraw(Record, frozen=True):
    """How the version of a new trajectory was drawn.

    `shares`: the probability of each version at the time of the draw, 1 in sum. `unit`: what one draw decides for, as a
    digest: a user or a session; None: this trajectory alone. `counted` is False if the trajectory is no evidence about
    its version: a rollout of the tuner or of a training set.
    """

    shares: Mapping[int, float]
    unit: str | None = None
    counted: bool = True


class ReleaseOutcome(Record, frozen=True):
    """What came of a counted trajectory. It is settled: later verdicts do not change it.

    `score` None: it was never scored. If `finished` is False, too, it did not end before its deadline or its last call
    was cut off, which is as bad as the worst score; otherwise nothing is known about its score (no peers, no feedback,
    a failed judge).
    """

    trajectory_id: str
    started_at: float
    seconds: float | None  # from its start to its last activity; None: it is still open
    version: int
    shares: Mapping[int, float]
    unit: str | None
    score: float | None
    group_scores: tuple[float, ...]  # of the other members of its group, whatever their versions
    finished: bool
    calls: int
    failed_calls: int  # answered with an error, or cut off


class ReleaseEvidence(Record, frozen=True):
    """What the release controller knows about one version. docs/release.md lists the keys of `evidence`."""

    alias: str
    version: int
    evidence: Mapping[str, Any]
    updated_at: float
