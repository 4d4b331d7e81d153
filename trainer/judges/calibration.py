"""Calibration: a judge's noise, its agreement with verified scores, and the influence of the members' order. Pure.

The judge scores each group twice, the second time in reverse order. Agreement is the share of pairs within a group with
different true scores that the judge orders correctly; ties count half. For binary truth that is the area under the ROC
curve; 0.5 is chance.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, variance

from ratchet.store.records import Verdict
from ratchet.store.statistics import wilson
from ratchet.trainer.statistics import kendall_tau_b, score_differences

Scores = Mapping[str, float]  # by trajectory


@dataclass(frozen=True, slots=True)
class Calibration:
    """The agreement of a judge with the truth.

    trajectories, groups  scored by truth and judge
    failures              failed verdicts of the judge, over both orders
    pairs                 within groups, with different true scores
    agreement, low, high  share of the pairs that the judge orders correctly, 95% Wilson interval (slightly narrow,
                          because the pairs of a group are dependent); None without pairs
    tau                   Kendall's tau-b over all pairs within groups; None if either has only ties
    swapped               share of the judge's untied pairs whose order is reversed in the other presentation
    moved                 mean |score - score in the other order|
    gap                   mean score of members with a true score above the group's mean, minus that of those below
    """

    trajectories: int
    groups: int
    failures: int
    pairs: int
    agreement: float | None
    low: float | None
    high: float | None
    tau: float | None
    swapped: float | None
    moved: float
    gap: float | None


@dataclass(frozen=True, slots=True)
class Noise:
    """The standard deviation of a judge's scores of one answer, and the groups and scored answers behind it."""

    noise: float
    groups: int
    trajectories: int


NOISE = "judge_noise"  # kind of the observations that hold a Noise, by version of the judge


@dataclass(frozen=True, slots=True)
class CalibrationGroup:
    """One group: the true verdicts, if there are any, and the judge's in normal and in reverse order."""

    truth: Sequence[Verdict]
    first: Sequence[Verdict]
    reverse: Sequence[Verdict]


def calibrate(groups: Sequence[CalibrationGroup]) -> Calibration:
    """Return the calibration over groups; trajectories with all three scores count."""
    scored = [one for one in (_common(group) for group in groups) if one]
    ordered = [pair for truth, first, _ in scored for pair in score_differences(truth, first)]
    untied = [(a, b) for a, b in ordered if a]
    hits = sum(1.0 if a * b > 0 else 0.5 if b == 0 else 0.0 for a, b in untied)
    agreement = hits / len(untied) if untied else None
    low, high = wilson(hits, len(untied)) if untied else (None, None)
    pairs_both_orders = [(a, b) for _, first, reverse in scored for a, b in score_differences(first, reverse) if a]
    changes = [abs(first[name] - reverse[name]) for _, first, reverse in scored for name in first]
    return Calibration(
        trajectories=sum(len(truth) for truth, _, _ in scored),
        groups=len(scored),
        failures=sum(verdict.score is None for group in groups for verdict in (*group.first, *group.reverse)),
        pairs=len(untied),
        agreement=agreement,
        low=low,
        high=high,
        tau=kendall_tau_b(ordered),
        swapped=sum(a * b < 0 for a, b in pairs_both_orders) / len(pairs_both_orders) if pairs_both_orders else None,
        moved=sum(changes) / len(changes) if changes else 0.0,
        gap=_gap(scored),
    )


def score_noise(groups: Sequence[CalibrationGroup]) -> Noise | None:
    """Return the judge's noise within groups; None if no group has two members with both scores.

    d is the difference of both scores of a member. What all members share leaves the advantages alone, so the variance
    of a single score is half the sample variance of d within its group, pooled over groups.
    """
    squares, freedom, members, counted = 0.0, 0, 0, 0
    for group in groups:
        first, reverse = _by_trajectory(group.first), _by_trajectory(group.reverse)
        gaps = [first[name] - reverse[name] for name in first.keys() & reverse.keys()]
        if len(gaps) < 2:
            continue
        squares += variance(gaps) * (len(gaps) - 1)
        freedom += len(gaps) - 1
        members += len(gaps)
        counted += 1
    return Noise(math.sqrt(squares / freedom / 2), counted, members) if freedom else None


def _common(group: CalibrationGroup) -> tuple[Scores, Scores, Scores] | None:
    """Return the three scores of the trajectories that have all of them; None for fewer than two."""
    scores_by_source = [_by_trajectory(verdicts) for verdicts in (group.truth, group.first, group.reverse)]
    shared = set.intersection(*map(set, scores_by_source))
    if len(shared) < 2:
        return None
    truth, first, reverse = ({name: scores[name] for name in sorted(shared)} for scores in scores_by_source)
    return truth, first, reverse


def _by_trajectory(verdicts: Sequence[Verdict]) -> dict[str, float]:
    return {verdict.trajectory_id: verdict.score for verdict in verdicts if verdict.score is not None}


def _gap(scored: Sequence[tuple[Scores, Scores, Scores]]) -> float | None:
    above: list[float] = []
    below: list[float] = []
    for truth, first, _ in scored:
        mean = sum(truth.values()) / len(truth)
        above += [first[name] for name, value in truth.items() if value > mean]
        below += [first[name] for name, value in truth.items() if value < mean]
    return sum(above) / len(above) - sum(below) / len(below) if above and below else None


# Rescoring: compares the verdicts of another judge, or another version, with earlier ones. Pure.
#
# Trajectories with both scores count. The comparison has Kendall's tau-a over pairs within groups (concordant minus
# discordant pairs, over all pairs) and the change of single scores.


@dataclass(frozen=True, slots=True)
class Comparison:
    """New verdicts compared with old ones. `tau` is None if all pairs are ties in both, means if nothing has both."""

    judged: int
    failures: int
    failure: str | None  # the commonest one
    failure_count: int
    mean_before: float | None
    mean_after: float | None
    mean_change: float | None  # mean |after - before|
    tau: float | None
    moved: tuple[tuple[str, float, float], ...]  # (trajectory, before, after), largest change first


def compare(groups: Sequence[tuple[Mapping[str, Verdict], Sequence[Verdict]]]) -> Comparison:
    """Return the comparison over groups of (old verdicts by trajectory, new verdicts)."""
    pairs: list[tuple[str, float, float]] = []
    failures: Counter[str] = Counter()
    concordance = compared = 0
    for old, new in groups:
        failures.update(str(verdict.failure) for verdict in new if verdict.score is None)
        same = [
            (verdict.trajectory_id, before.score, verdict.score)
            for verdict in new
            if (before := old.get(verdict.trajectory_id)) is not None
            and before.score is not None
            and verdict.score is not None
        ]
        pairs.extend(same)
        for (_, a, b), (_, c, d) in combinations(same, 2):
            concordance += ((a - c) * (b - d) > 0) - ((a - c) * (b - d) < 0)
            compared += a != c or b != d
    failure, times = failures.most_common(1)[0] if failures else (None, 0)
    return Comparison(
        judged=len(pairs),
        failures=failures.total(),
        failure=failure,
        failure_count=times,
        mean_before=fmean(before for _, before, _ in pairs) if pairs else None,
        mean_after=fmean(after for _, _, after in pairs) if pairs else None,
        mean_change=fmean(abs(after - before) for _, before, after in pairs) if pairs else None,
        tau=concordance / compared if compared else None,
        moved=tuple(sorted(pairs, key=lambda pair: -abs(pair[2] - pair[1]))),
    )
