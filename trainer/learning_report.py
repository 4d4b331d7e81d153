"""Is it learning? Scores of real traffic before and after, with 95% intervals. Pure.

`before` is the traffic of the first version that served, `after` that of the newest, with as many versions next to it
as it takes to have `ENOUGH` scores. The gain is the difference of the means, its interval Welch's (unequal variances)
in the normal approximation. Where the same tasks came under both, the gain is also taken task by task, which the mix of
tasks cannot fake; its interval is that of `tuning/intervals.py`, which holds for few tasks. Says "unknown" where the
interval holds zero; nothing is rounded in favour of anybody.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from store.records import PastScore
from trainer.tuning.intervals import interval

ENOUGH = 30  # scores on each side
ALL = "all"
_Z = statistics.NormalDist().inv_cdf(0.975)


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
    """One task family, or all of them. `same_tasks` is None where no task came under both sides."""

    family: str
    before: Side
    after: Side
    gain: Gain
    same_tasks: Gain | None


@dataclass(frozen=True, slots=True)
class VersionScore:
    """The mean score of one version's traffic with its 95% interval."""

    version: int
    count: int
    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class LearningReport:
    """The whole report; empty where there are too few scores or one version alone."""

    families: tuple[FamilyReport, ...]  # `all` first
    versions: tuple[VersionScore, ...]
    missing: str | None  # why there is no comparison


def learning_report(scores: Sequence[PastScore]) -> LearningReport:
    """Return the report on the latest score of each trajectory."""
    latest = list({scored.trajectory_id: scored for scored in sorted(scores, key=lambda one: one.judged_at)}.values())
    versions = _by_version(latest)
    curve = tuple(_version_score(version, versions[version]) for version in sorted(versions))
    if len(versions) < 2:
        served = f"version {next(iter(versions))}" if versions else "none"
        return LearningReport((), curve, f"scores of two versions are needed; there are those of {served}")
    sides = _sides(versions)
    if sides is None:
        return LearningReport((), curve, f"each side needs {ENOUGH} scores; there are {len(latest)} in all")
    before, after = sides
    names = sorted({one.family for one in before} & {one.family for one in after})
    reports = [_report(ALL, before, after)]
    if len(names) > 1:
        reports += [
            _report(n, [x for x in before if x.family == n], [x for x in after if x.family == n]) for n in names
        ]
    return LearningReport(tuple(reports), curve, None)


def _by_version(scores: Sequence[PastScore]) -> dict[int, list[PastScore]]:
    versions: dict[int, list[PastScore]] = {}
    for scored in scores:
        versions.setdefault(scored.version, []).append(scored)
    return versions


def _sides(versions: Mapping[int, list[PastScore]]) -> tuple[list[PastScore], list[PastScore]] | None:
    """Return the scores before and after, from both ends inwards; None where they would meet."""
    order = sorted(versions)
    before: list[PastScore] = []
    after: list[PastScore] = []
    while order and len(before) < ENOUGH:
        before += versions[order.pop(0)]
    while order and len(after) < ENOUGH:
        after += versions[order.pop()]
    return (before, after) if len(before) >= ENOUGH and len(after) >= ENOUGH else None


def _report(family: str, before: Sequence[PastScore], after: Sequence[PastScore]) -> FamilyReport:
    return FamilyReport(family, _side(before), _side(after), _difference(before, after), _same_tasks(before, after))


def _side(scores: Sequence[PastScore]) -> Side:
    versions = [scored.version for scored in scores]
    return Side(min(versions), max(versions), len(scores), statistics.fmean(scored.score for scored in scores))


def _difference(before: Sequence[PastScore], after: Sequence[PastScore]) -> Gain:
    sides = [[scored.score for scored in side] for side in (before, after)]
    gain = statistics.fmean(sides[1]) - statistics.fmean(sides[0])
    reach = _Z * math.sqrt(sum(_variance(side) / len(side) for side in sides))
    return Gain(gain, gain - reach, gain + reach, len(before) + len(after))


def _same_tasks(before: Sequence[PastScore], after: Sequence[PastScore]) -> Gain | None:
    """Return the mean over tasks of the gain on each task that came under both sides."""
    means: list[dict[str, float]] = []
    for side in (before, after):
        tasks: dict[str, list[float]] = {}
        for scored in side:
            tasks.setdefault(scored.cohort, []).append(scored.score)
        means.append({task: statistics.fmean(values) for task, values in tasks.items()})
    gains = [means[1][task] - means[0][task] for task in means[0] if task in means[1]]
    if len(gains) < 2:
        return None
    seen = [mean for side in means for mean in side.values()]
    low, high = interval(gains, max(seen) - min(seen) or 1.0)
    return Gain(statistics.fmean(gains), low, high, len(gains))


def _version_score(version: int, scores: Sequence[PastScore]) -> VersionScore:
    values = [scored.score for scored in scores]
    mean = statistics.fmean(values)
    reach = _Z * math.sqrt(_variance(values) / len(values)) if len(values) > 1 else math.inf
    return VersionScore(version, len(values), mean, mean - reach, mean + reach)


def _variance(values: Sequence[float]) -> float:
    return statistics.variance(values) if len(values) > 1 else 0.0
