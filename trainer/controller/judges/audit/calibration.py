"""Calibration: how far a judge agrees with what can be verified, and whether the order of the members sways it. Pure.

A judge is asked twice about each group, the second time with the members in reverse. Against the truth it is judged by
pairs of one group that the truth tells apart: the share that it orders the same way, a tie counting half. That is the
area under the ROC curve where the truth is right or wrong. 0.5 is a coin.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from ratchet.store.records import Verdict

_Z = 1.96  # 95%

Scores = Mapping[str, float]  # by trajectory


@dataclass(frozen=True, slots=True)
class Calibration:
    """A judge against the truth.

    trajectories, groups  that truth and judge both scored
    failures              verdicts that the judge could not give, both times together
    pairs                 of one group, that the truth tells apart
    agreement, low, high  share of those that the judge orders the same, 95% Wilson interval; None without pairs
    tau                   Kendall's tau-b over all pairs of one group; None where either never tells any apart
    swapped               of the pairs that the judge told apart, the share whose order another place turned round
    moved                 mean |score - score in the other place|
    gap                   mean score where the truth is above its group's mean, minus that where it is below
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
class CalibrationGroup:
    """One group: what the truth says, and what the judge said first and with the members in reverse."""

    truth: Sequence[Verdict]
    first: Sequence[Verdict]
    reverse: Sequence[Verdict]


def calibrate(groups: Sequence[CalibrationGroup]) -> Calibration:
    """Return the calibration over groups; only what all three scored counts."""
    said = [one for one in (_common(group) for group in groups) if one]
    ordered = [pair for truth, first, _ in said for pair in _pairs(truth, first)]
    told_apart = [(a, b) for a, b in ordered if a]
    hits = sum(1.0 if a * b > 0 else 0.5 if b == 0 else 0.0 for a, b in told_apart)
    agreement = hits / len(told_apart) if told_apart else None
    low, high = _wilson(hits, len(told_apart)) if told_apart else (None, None)
    turned = [(a, b) for _, first, reverse in said for a, b in _pairs(first, reverse) if a]
    moves = [abs(first[name] - reverse[name]) for _, first, reverse in said for name in first]
    return Calibration(
        trajectories=sum(len(truth) for truth, _, _ in said),
        groups=len(said),
        failures=sum(verdict.score is None for group in groups for verdict in (*group.first, *group.reverse)),
        pairs=len(told_apart),
        agreement=agreement,
        low=low,
        high=high,
        tau=kendall(ordered),
        swapped=sum(a * b < 0 for a, b in turned) / len(turned) if turned else None,
        moved=sum(moves) / len(moves) if moves else 0.0,
        gap=_gap(said),
    )


def kendall(pairs: Iterable[tuple[float, float]]) -> float | None:
    """Return Kendall's tau-b of pairs of differences (in one, in the other); None where either tells none apart."""
    both = first = second = 0
    for a, b in pairs:
        both += (a * b > 0) - (a * b < 0)
        first += a != 0
        second += b != 0
    return both / math.sqrt(first * second) if first and second else None


def differences(one: Scores, other: Scores) -> list[tuple[float, float]]:
    """Return, per pair of trajectories that both scored, the differences in one and in the other."""
    shared = sorted(set(one) & set(other))
    return _pairs({name: one[name] for name in shared}, other)


def _pairs(one: Scores, other: Scores) -> list[tuple[float, float]]:
    return [(one[a] - one[b], other[a] - other[b]) for a, b in combinations(sorted(one), 2)]


def _common(group: CalibrationGroup) -> tuple[Scores, Scores, Scores] | None:
    """Return the three scores of the trajectories that all three scored; None where fewer than two are left."""
    given = [
        {verdict.trajectory_id: verdict.score for verdict in verdicts if verdict.score is not None}
        for verdicts in (group.truth, group.first, group.reverse)
    ]
    shared = set.intersection(*map(set, given))
    if len(shared) < 2:
        return None
    truth, first, reverse = ({name: scores[name] for name in sorted(shared)} for scores in given)
    return truth, first, reverse


def _gap(said: Sequence[tuple[Scores, Scores, Scores]]) -> float | None:
    above: list[float] = []
    below: list[float] = []
    for truth, first, _ in said:
        mean = sum(truth.values()) / len(truth)
        above += [first[name] for name, value in truth.items() if value > mean]
        below += [first[name] for name, value in truth.items() if value < mean]
    return sum(above) / len(above) - sum(below) / len(below) if above and below else None


def _wilson(hits: float, count: int) -> tuple[float, float]:
    """Return the Wilson interval of a share. Pairs of a group depend on each other, so that it is a little narrow."""
    share = hits / count
    middle = share + _Z**2 / (2 * count)
    reach = _Z * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    whole = 1 + _Z**2 / count
    return max(0.0, (middle - reach) / whole), min(1.0, (middle + reach) / whole)
