"""Is it learning? Scores of real traffic before and after, with 95% intervals. Pure.

`before` is the traffic of the first version that served, `after` that of the newest, with as many versions next to it
as it takes to have `ENOUGH` scores. The gain is the difference of the means, its interval Welch's (unequal variances)
in the normal approximation. Where the same tasks came under both, the gain is also taken task by task, which the mix of
tasks cannot fake. All intervals take in the two half observations of `tuning/intervals.py`, so that equal scores are no
certainty, and none reaches over what scores can be: 0 to 1 where all lie there, else from the least to the largest that
were seen. Says "unknown" where the interval holds zero; nothing is rounded in favour of anybody.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from store.records import PastScore
from trainer.tuning.intervals import interval, squared_error

ENOUGH = 30  # scores on each side
ALL = "all"
_Z = statistics.NormalDist().inv_cdf(0.975)

Range = tuple[float, float]  # what a score can be


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
    """The mean score of one version's traffic with its 95% interval; of one score alone that is all it can be."""

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
    versions, reach = _by_version(latest), _range([one.score for one in latest])
    curve = tuple(_version_score(version, versions[version], reach) for version in sorted(versions))
    if len(versions) < 2:
        served = f"version {next(iter(versions))}" if versions else "none"
        return LearningReport((), curve, f"scores of two versions are needed; there are those of {served}")
    sides = _sides(versions)
    if sides is None:
        return LearningReport((), curve, f"each side needs {ENOUGH} scores; there are {len(latest)} in all")
    before, after = sides
    names = sorted({one.family for one in before} & {one.family for one in after})
    reports = [_report(ALL, before, after, reach)]
    if len(names) > 1:
        reports += [
            _report(n, [x for x in before if x.family == n], [x for x in after if x.family == n], reach) for n in names
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


def _range(scores: Sequence[float]) -> Range:
    """Return what scores can be, as far as those that were seen tell."""
    least, largest = min(scores, default=0.0), max(scores, default=1.0)
    if least >= 0 and largest <= 1:
        return 0.0, 1.0
    return (least, largest) if least < largest else (least - 0.5, least + 0.5)


def _report(family: str, before: Sequence[PastScore], after: Sequence[PastScore], reach: Range) -> FamilyReport:
    gain = _difference(before, after, reach)
    return FamilyReport(family, _side(before), _side(after), gain, _same_tasks(before, after, reach))


def _side(scores: Sequence[PastScore]) -> Side:
    versions = [scored.version for scored in scores]
    return Side(min(versions), max(versions), len(scores), statistics.fmean(scored.score for scored in scores))


def _difference(before: Sequence[PastScore], after: Sequence[PastScore], reach: Range) -> Gain:
    sides = [[scored.score for scored in side] for side in (before, after)]
    gain = statistics.fmean(sides[1]) - statistics.fmean(sides[0])
    width = reach[1] - reach[0]
    error = _Z * math.sqrt(sum(squared_error(_centred(side, reach), width / 2) for side in sides))
    return Gain(gain, max(-width, gain - error), min(width, gain + error), len(before) + len(after))


def _same_tasks(before: Sequence[PastScore], after: Sequence[PastScore], reach: Range) -> Gain | None:
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
    low, high = interval(gains, reach[1] - reach[0])
    return Gain(statistics.fmean(gains), low, high, len(gains))


def _version_score(version: int, scores: Sequence[PastScore], reach: Range) -> VersionScore:
    values = [scored.score for scored in scores]
    low, high = interval(_centred(values, reach), (reach[1] - reach[0]) / 2)
    middle = (reach[0] + reach[1]) / 2
    return VersionScore(version, len(values), statistics.fmean(values), middle + low, middle + high)


def _centred(values: Sequence[float], reach: Range) -> list[float]:
    """Return values as they lie around the middle of what they can be."""
    return [value - (reach[0] + reach[1]) / 2 for value in values]
