"""Candidates compared on the same tasks: differences with intervals, and a ranking that tells ties as ties. Pure.

Several attempts at a task are averaged first, so that the task is the unit, whatever the number of attempts. What went
wrong stays in: a failed rollout counts as the failure score, and never as more than the lowest judged score; what the
judge failed on is unjudged, never a number. Where there are unjudged attempts, the interval and the p-value hold
whatever they would have got: both are the wider ones of two fillings, all against the candidate and all in its favour.
One candidate is better than another where its interval excludes zero and its p-value, corrected by Holm over all
pairs, is small enough; else they are tied, or inconclusive where unjudged attempts could change that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import combinations

import msgspec

from ratchet.store.statistics import CONFIDENCE, interval
from ratchet.trainer.statistics.sign_flip_test import holm, sign_flip_p


class Missing(StrEnum):
    """Why an attempt has no score of its own."""

    FAILED = "failed"  # the rollout ended in an error: it counts as the failure score
    UNJUDGED = "unjudged"  # the judge failed, or the attempt has not been made


Mark = float | Missing
Marks = Mapping[str, Sequence[Mark]]  # by task, one for each attempt


class ComparisonVerdict(StrEnum):
    """What is known of a candidate against another."""

    BETTER = "better"
    WORSE = "worse"
    TIED = "tied"  # nothing is shown either way
    INCONCLUSIVE = "inconclusive"  # unjudged attempts could change it


class ScoreRange(msgspec.Struct, frozen=True):
    """The worst and the best score that the judge can give."""

    low: float
    high: float


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """The mean over tasks of (candidate - against), with an interval that holds whatever the unjudged would get.

    Means and difference are of the tasks that both have judged attempts at; None where there is no such task.
    """

    candidate: str
    against: str
    tasks: int
    mean: float | None
    against_mean: float | None
    difference: float | None
    low: float
    high: float
    p_value: float  # corrected where several pairs are compared
    unjudged: int  # attempts, on either side
    failed: int  # attempts of the candidate
    against_failed: int
    settled: bool  # whether the unjudged could not change what is shown
    confidence: float = CONFIDENCE

    @property
    def verdict(self) -> ComparisonVerdict:
        """better or worse where that is shown; else tied, or inconclusive."""
        shown = self.p_value < 1 - self.confidence
        if shown and self.low > 0:
            return ComparisonVerdict.BETTER
        if shown and self.high < 0:
            return ComparisonVerdict.WORSE
        return ComparisonVerdict.TIED if self.settled else ComparisonVerdict.INCONCLUSIVE

    def describe(self) -> str:
        """Return it in one clause."""
        if self.difference is None:
            return f"no task was judged for both; {self.unjudged} attempts are unjudged"
        text = (
            f"{self.difference:+.3f} ({self.low:+.3f} to {self.high:+.3f}) on {self.tasks} tasks, p {self.p_value:.3g}"
        )
        return f"{text}; {self.unjudged} unjudged" if self.unjudged else text


class CandidateScore(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate by itself: the mean over its tasks with an interval, and what went wrong."""

    candidate: str
    tasks: int
    mean: float | None
    low: float
    high: float
    failed: int
    unjudged: int


class Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """Candidates by mean, best first, and every pair of them; `first` are those that none is shown to be better than.

    `winner` is the only one that is shown to be better than all others; None where there is none.
    """

    scores: tuple[CandidateScore, ...]
    pairs: tuple[Compared, ...]
    first: tuple[str, ...]
    winner: str | None
    score_range: ScoreRange
    failure_score: float  # what a failed rollout counted as

    def pair(self, candidate: str, against: str) -> Compared:
        """Return the comparison of two candidates, in the given direction. Raises KeyError."""
        for pair in self.pairs:
            if (pair.candidate, pair.against) == (candidate, against):
                return pair
            if (pair.against, pair.candidate) == (candidate, against):
                return reverse(pair)
        known = ", ".join(score.candidate for score in self.scores)
        raise KeyError(f"{candidate} and {against} were not compared; compared were {known}")


def compare(
    marks: Marks,
    against: Marks,
    *,
    names: tuple[str, str] = ("candidate", "against"),
    score_range: ScoreRange | None = None,
    failure_score: float = 0.0,
    confidence: float = CONFIDENCE,
) -> Compared:
    """Return the comparison of two; a task that only one was asked counts as unjudged for the other.

    `score_range`: what the judge can give; without it, what it gave here, and 0 to 1 at least.
    """
    failure = _failure((marks, against), failure_score)
    return _compare(marks, against, names, _range((marks, against), failure, score_range), failure, confidence)


def rank(
    candidates: Mapping[str, Marks],
    *,
    score_range: ScoreRange | None = None,
    failure_score: float = 0.0,
    confidence: float = CONFIDENCE,
) -> Ranking:
    """Return the ranking of at least one candidate; p-values are corrected over all pairs."""
    failure = _failure(candidates.values(), failure_score)
    possible = _range(candidates.values(), failure, score_range)
    scores = sorted(
        (_score(name, marks, possible, failure, confidence) for name, marks in candidates.items()),
        key=lambda one: (-math.inf if one.mean is None else one.mean, -one.unjudged),
        reverse=True,
    )
    order = [one.candidate for one in scores]
    pairs = [
        _compare(candidates[one], candidates[other], (one, other), possible, failure, confidence)
        for one, other in combinations(order, 2)
    ]
    corrected = holm([pair.p_value for pair in pairs])
    pairs = [msgspec.structs.replace(pair, p_value=p) for pair, p in zip(pairs, corrected, strict=True)]
    beaten = {pair.against for pair in pairs if pair.verdict is ComparisonVerdict.BETTER}
    beaten |= {pair.candidate for pair in pairs if pair.verdict is ComparisonVerdict.WORSE}
    first = tuple(name for name in order if name not in beaten)
    return Ranking(
        scores=tuple(scores), pairs=tuple(pairs), first=first, winner=_winner(order, pairs),
        score_range=possible, failure_score=failure,
    )  # fmt: skip


def reverse(pair: Compared) -> Compared:
    """Return a comparison seen from the other side."""
    return msgspec.structs.replace(
        pair, candidate=pair.against, against=pair.candidate, mean=pair.against_mean, against_mean=pair.mean,
        difference=None if pair.difference is None else -pair.difference, low=-pair.high, high=-pair.low,
        failed=pair.against_failed, against_failed=pair.failed,
    )  # fmt: skip


def _winner(order: Sequence[str], pairs: Sequence[Compared]) -> str | None:
    for name in order:
        own = [
            pair if pair.candidate == name else reverse(pair)
            for pair in pairs
            if name in (pair.candidate, pair.against)
        ]
        if own and all(pair.verdict is ComparisonVerdict.BETTER for pair in own):
            return name
    return None


def _failure(sides: Iterable[Marks], failure_score: float) -> float:
    """Return what a failed rollout counts as: never more than the lowest score that was judged."""
    return min((failure_score, *_scores(sides)))


def _range(sides: Iterable[Marks], failure: float, known: ScoreRange | None) -> ScoreRange:
    """Return the range of the scores: the known one or 0 to 1, made wide enough for what was seen."""
    seen = [failure, *_scores(sides), *((known.low, known.high) if known else (0.0, 1.0))]
    return ScoreRange(min(seen), max(seen))


def _scores(sides: Iterable[Marks]) -> list[float]:
    return [
        mark for marks in sides for attempts in marks.values() for mark in attempts if not isinstance(mark, Missing)
    ]


def _compare(
    marks: Marks, against: Marks, names: tuple[str, str], possible: ScoreRange, failure: float, confidence: float
) -> Compared:
    judged, other = _judged(marks, failure), _judged(against, failure)
    tasks = [task for task in judged if task in other]
    means, others = [judged[task] for task in tasks], [other[task] for task in tasks]
    unjudged = _unjudged(marks, against) + _unjudged(against, marks)
    every = list(dict.fromkeys((*marks, *against)))
    width = possible.high - possible.low
    fillings = [
        (_filled(marks, every, failure, own), _filled(against, every, failure, others_get))
        for own, others_get in ((possible.low, possible.high), (possible.high, possible.low))
    ]
    found = [_shown(*filling, width, confidence) for filling in fillings[: 2 if unjudged else 1]]
    return Compared(
        candidate=names[0], against=names[1], tasks=len(tasks), mean=_mean(means), against_mean=_mean(others),
        difference=_mean([a - b for a, b in zip(means, others, strict=True)]),
        low=min(low for low, _, _ in found), high=max(high for _, high, _ in found),
        p_value=1.0 if len({_side(*one) for one in found}) > 1 else max(p for _, _, p in found),
        unjudged=unjudged, failed=_count(marks, Missing.FAILED), against_failed=_count(against, Missing.FAILED),
        settled=len({_side(*one) if one[2] < 1 - confidence else 0 for one in found}) == 1, confidence=confidence,
    )  # fmt: skip


def _shown(
    means: Sequence[float], others: Sequence[float], width: float, confidence: float
) -> tuple[float, float, float]:
    """Return low, high and p of the mean difference; no task at all shows nothing."""
    gains = [mean - other for mean, other in zip(means, others, strict=True)]
    if not gains:
        return -width, width, 1.0
    scores = (*means, *others)
    spread = max(scores) - min(scores) if len(gains) > 1 else width
    low, high = interval(gains, spread or width, confidence)
    return low, high, sign_flip_p(gains)


def _side(low: float, high: float, _: float) -> int:
    return 1 if low > 0 else -1 if high < 0 else 0


def _score(name: str, marks: Marks, possible: ScoreRange, failure: float, confidence: float) -> CandidateScore:
    judged = list(_judged(marks, failure).values())
    middle = (possible.low + possible.high) / 2
    half = (possible.high - possible.low) / 2
    low, high = interval([mean - middle for mean in judged], half, confidence) if judged else (-half, half)
    return CandidateScore(
        candidate=name, tasks=len(judged), mean=_mean(judged), low=low + middle, high=high + middle,
        failed=_count(marks, Missing.FAILED), unjudged=_count(marks, Missing.UNJUDGED),
    )  # fmt: skip


def _judged(marks: Marks, failure: float) -> dict[str, float]:
    """Return the mean of the judged and the failed attempts by task; tasks without any are left out."""
    means = {}
    for task, attempts in marks.items():
        known = [_number(mark, failure, None) for mark in attempts]
        if scores := [score for score in known if score is not None]:
            means[task] = math.fsum(scores) / len(scores)
    return means


def _filled(marks: Marks, tasks: Sequence[str], failure: float, unjudged: float) -> list[float]:
    """Return the mean of all attempts by task, with a number for the unjudged."""
    means = []
    for task in tasks:
        scores = [_number(mark, failure, unjudged) for mark in marks.get(task) or (Missing.UNJUDGED,)]
        means.append(math.fsum(score for score in scores if score is not None) / len(scores))
    return means


def _number(mark: Mark, failure: float, unjudged: float | None) -> float | None:
    if not isinstance(mark, Missing):
        return mark
    return failure if mark is Missing.FAILED else unjudged


def _unjudged(marks: Marks, other: Marks) -> int:
    """Return the unjudged attempts of one side; a task that only the other was asked is one."""
    return _count(marks, Missing.UNJUDGED) + sum(not marks.get(task) for task in other)


def _count(marks: Marks, kind: Missing) -> int:
    return sum(mark is kind for attempts in marks.values() for mark in attempts)


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def within_best(
    candidates: Mapping[str, Marks],
    margin: float,
    *,
    score_range: ScoreRange | None = None,
    failure_score: float = 0.0,
    alpha: float = 0.05,
) -> tuple[str, ...]:
    """Return those that are shown to be worse than none of the others by as much as the margin.

    Each must be shown against every other, which needs no correction (Berger 1982, Technometrics 24); that there are
    several such claims does: the one-sided level is alpha / candidates.
    """
    failure = _failure(candidates.values(), failure_score)
    possible = _range(candidates.values(), failure, score_range)
    confidence = 1 - 2 * alpha / max(2, len(candidates))

    def low(name: str, other: str) -> float:
        return _compare(candidates[name], candidates[other], (name, other), possible, failure, confidence).low

    return tuple(
        name for name in candidates if all(low(name, other) > -margin for other in candidates if other != name)
    )
