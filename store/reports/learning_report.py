"""The learning report: scores of live traffic before and after, with 95% intervals. Pure.

`before` is the traffic of the first version, `after` that of the newest, each with as many adjacent versions as are
needed for `MIN_SCORES_PER_SIDE` scores; versions that were rejected or are in a ramp are on neither side. The gain is
the difference of the means, with Welch's interval (unequal variances) in the normal approximation. For tasks on both
sides, the gain is also computed task by task, so that a change in the mix of tasks does not matter. All intervals
include the two half observations of statistics.py, so that equal scores do not look certain, and are clipped to the
range of scores: 0 to 1 if all lie there, else from the lowest to the highest seen. The verdict is "unknown" if the
interval contains zero.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ratchet.store.records import PastScore, Tally
from ratchet.store.reports.learning_comparison import FamilyReport, Gain, Side, VersionScore
from ratchet.store.reports.learning_notes import describe_gaps, more_scores
from ratchet.store.reports.policy_movement import Movement
from ratchet.store.statistics import Sums, interval, interval_of, squared_error, sums_of

MIN_SCORES_PER_SIDE = 30  # scores on each side
RELATIVE_SCORES_NOTE = (
    "the judge's scores are relative: they rank the members of one group, and their mean is the same for good and for "
    "bad versions; compare versions with trainer.release.held_out_share, `ratchet eval`, or a judge that scores each "
    "answer by "
    "itself"
)
ALL_FAMILIES = "all"
_Z = statistics.NormalDist().inv_cdf(0.975)

Range = tuple[float, float]  # what a score can be


@dataclass(frozen=True, slots=True)
class LearningReport:
    """The report; without families if there are too few scores or only one version."""

    families: tuple[FamilyReport, ...]  # `all` first
    versions: tuple[VersionScore, ...]
    missing: str | None  # why there is no comparison
    notes: tuple[str, ...] = ()  # missing scores, pooled versions, wide intervals
    unproven: str | None = None  # versions that serve nobody, whose traffic is therefore missing; why, and the remedies


def tallies(scores: Sequence[PastScore]) -> list[Tally]:
    """Return sums over the latest score of each trajectory."""
    latest = {scored.trajectory_id: scored for scored in sorted(scores, key=lambda one: one.judged_at)}
    sums: dict[tuple[int, str, str], list[float]] = defaultdict(list)
    for scored in latest.values():
        sums[scored.version, scored.family, scored.cohort].append(scored.score)
    return [
        Tally(
            version=version, family=family, cohort=cohort, sums=sums_of(values), least=min(values), largest=max(values)
        )
        for (version, family, cohort), values in sums.items()
    ]


def learning_report(
    rows: Sequence[Tally], newest_first: Sequence[Movement] = (), left_out: Collection[int] = ()
) -> LearningReport:
    """Return the report.

    `newest_first`: how far the last rounds moved the policy; `left_out`: versions that are in the curve alone.
    """
    scored, reach = _by_version(rows), _range(rows)
    curve = tuple(_version_score(version, scored[version], reach) for version in sorted(scored))
    versions = {version: found for version, found in scored.items() if version not in left_out}
    if len(versions) < 2:
        served = f"only version {next(iter(versions))} has any" if versions else "none has any"
        return LearningReport((), curve, f"two versions need scores; {served}")
    sides = _sides(versions)
    if sides is None:
        count = sum(_sums(one).count for one in versions.values())
        text = (
            f"each side needs {MIN_SCORES_PER_SIDE} scores; there are {count} in all, {_lacking(versions)} are missing"
        )
        return LearningReport((), curve, text)
    before, after = sides
    names = sorted({one.family for one in before} & {one.family for one in after})
    reports = [_report(ALL_FAMILIES, before, after, reach)]
    if len(names) > 1:
        reports += [
            _report(n, [x for x in before if x.family == n], [x for x in after if x.family == n], reach) for n in names
        ]
    compared = [one for one in curve if one.version in versions]
    notes = describe_gaps(reports[0], compared, MIN_SCORES_PER_SIDE, newest_first)
    if unreleased := ", ".join(f"@{version}" for version in sorted(scored.keys() - versions.keys())):
        notes += (f"left out: {unreleased}, rejected or in a ramp",)
    return LearningReport(tuple(reports), curve, None, notes)


def relative_report() -> LearningReport:
    """Return the report for relative scores, whose means cannot be compared across versions."""
    return LearningReport((), (), RELATIVE_SCORES_NOTE)


def to_dict(report: LearningReport) -> dict[str, Any]:
    """Return the report as JSON values."""
    content = asdict(report)
    for rows, family in zip(content["families"], report.families, strict=True):
        rows["gain"]["verdict"] = family.gain.verdict
        if family.same_tasks is not None:
            rows["same_tasks"]["verdict"] = family.same_tasks.verdict
    return content


def _by_version(rows: Sequence[Tally]) -> dict[int, list[Tally]]:
    versions: dict[int, list[Tally]] = {}
    for one in rows:
        versions.setdefault(one.version, []).append(one)
    return versions


def _sides(versions: Mapping[int, list[Tally]]) -> tuple[list[Tally], list[Tally]] | None:
    """Return the scores of both sides, collected from both ends; None if they would overlap."""
    order = sorted(versions)
    before: list[Tally] = []
    after: list[Tally] = []
    while order and _sums(before).count < MIN_SCORES_PER_SIDE:
        before += versions[order.pop(0)]
    while order and _sums(after).count < MIN_SCORES_PER_SIDE:
        after += versions[order.pop()]
    return (before, after) if min(_sums(before).count, _sums(after).count) >= MIN_SCORES_PER_SIDE else None


def _lacking(versions: Mapping[int, list[Tally]]) -> int:
    """Return the number of missing scores for two sides, with each version on one of them."""
    order = sorted(versions)
    before = 0
    while order and before < MIN_SCORES_PER_SIDE:
        before += _sums(versions[order.pop(0)]).count
    after = sum(_sums(versions[version]).count for version in order)
    return max(0, MIN_SCORES_PER_SIDE - before) + max(0, MIN_SCORES_PER_SIDE - after)


def _range(rows: Sequence[Tally]) -> Range:
    """Return the range of scores, judged from those seen."""
    least, largest = min((one.least for one in rows), default=0.0), max((one.largest for one in rows), default=1.0)
    if least >= 0 and largest <= 1:
        return 0.0, 1.0
    return (least, largest) if least < largest else (least - 0.5, least + 0.5)


def _report(family: str, before: Sequence[Tally], after: Sequence[Tally], reach: Range) -> FamilyReport:
    gain = _difference(before, after, reach)
    errors, count = _squared_errors(before, after, reach), _sums(after).count
    more = more_scores(gain.value, *errors, count, _Z) if gain.verdict == "unknown" else None
    return FamilyReport(family, _side(before), _side(after), gain, _same_tasks(before, after, reach), more)


def _side(rows: Sequence[Tally]) -> Side:
    versions, sums = [one.version for one in rows], _sums(rows)
    return Side(min(versions), max(versions), sums.count, sums.mean)


def _difference(before: Sequence[Tally], after: Sequence[Tally], reach: Range) -> Gain:
    sides = [_sums(before), _sums(after)]
    gain = sides[1].mean - sides[0].mean
    width = reach[1] - reach[0]
    error = _Z * math.sqrt(sum(_squared_errors(before, after, reach)))
    return Gain(gain, max(-width, gain - error), min(width, gain + error), sides[0].count + sides[1].count)


def _squared_errors(before: Sequence[Tally], after: Sequence[Tally], reach: Range) -> tuple[float, float]:
    """Return the squared standard errors of both means."""
    width, middle = reach[1] - reach[0], (reach[0] + reach[1]) / 2
    one, other = (squared_error(_sums(side).around(middle), width / 2) for side in (before, after))
    return one, other


def _same_tasks(before: Sequence[Tally], after: Sequence[Tally], reach: Range) -> Gain | None:
    """Return the mean gain over the tasks on both sides."""
    means: list[dict[str, float]] = []
    for side in (before, after):
        tasks: dict[str, list[Tally]] = {}
        for one in side:
            tasks.setdefault(one.cohort, []).append(one)
        means.append({task: _sums(found).mean for task, found in tasks.items()})
    gains = [means[1][task] - means[0][task] for task in means[0] if task in means[1]]
    if len(gains) < 2:
        return None
    low, high = interval(gains, reach[1] - reach[0])
    return Gain(statistics.fmean(gains), low, high, len(gains))


def _version_score(version: int, rows: Sequence[Tally], reach: Range) -> VersionScore:
    sums, middle = _sums(rows), (reach[0] + reach[1]) / 2
    low, high = interval_of(sums.around(middle), (reach[1] - reach[0]) / 2)
    return VersionScore(version, sums.count, sums.mean, middle + low, middle + high)


def _sums(rows: Iterable[Tally]) -> Sums:
    parts = [one.sums for one in rows]
    totals, squares = math.fsum(part.total for part in parts), math.fsum(part.squares for part in parts)
    return Sums(sum(part.count for part in parts), totals, squares)
