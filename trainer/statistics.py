"""Statistics of comparisons: correlation, sequences of intervals, spread, and paired and unpaired tests."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from itertools import combinations

import msgspec

from ratchet.store.errors import install_hint
from ratchet.store.statistics import CONFIDENCE, interval
from ratchet.trainer.errors import TuningError

# Kendall's tau-b over the pairs of several groups.
#
# scipy.stats.kendalltau compares all pairs of two samples. Here only members of the same group are comparable, so the
# pairs of each group are pooled.


def kendall_tau_b(pairs: Iterable[tuple[float, float]]) -> float | None:
    """Return tau-b of pairs of differences (in one score, in the other); None if either score ties every pair."""
    concordance = first = second = 0
    for a, b in pairs:
        concordance += (a * b > 0) - (a * b < 0)
        first += a != 0
        second += b != 0
    return concordance / math.sqrt(first * second) if first and second else None


def score_differences(one: Mapping[str, float], other: Mapping[str, float]) -> list[tuple[float, float]]:
    shared = sorted(set(one) & set(other))
    return [(one[a] - one[b], other[a] - other[b]) for a, b in combinations(shared, 2)]


# The radius of an interval for a mean that may be looked at after every score. Pure.
#
# The interval is an asymptotic confidence sequence: it holds the true mean at all times together with probability 1 -
# alpha, not only at one time that was chosen before (Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas 2021, "Time-
# uniform central limit theory and asymptotic confidence sequences", arXiv:2103.06476, theorem 2.2). For the difference
# of two streams of n and m scores, t = n m / (n + m) is the size of one stream with the same variance of the mean.

_TIGHTEST_AT = 100.0  # scores at which the interval is narrowest for its guarantee


@dataclass(frozen=True, slots=True)
class MeanDifference:
    """Mean score of newer versions minus that of an older one, with an interval that holds at all times (95%)."""

    value: float
    low: float
    high: float
    count: int


def boundary(t: float, alpha: float) -> float:
    """Return the radius of the sequence for unit variance after t scores."""
    aim = -2.0 * math.log(alpha)
    rho2 = (aim + math.log(aim) + 1.0) / _TIGHTEST_AT
    return math.sqrt(2.0 * (t * rho2 + 1.0) / (t * t * rho2) * math.log(math.sqrt(t * rho2 + 1.0) / alpha))


# The smallest difference between scores that counts as one, by the judge's noise. Pure.
#
# The noise is the standard deviation of a judge's scores of one and the same answer. If a group's answers are equally
# good, (G - 1) s^2 / noise^2, with its sample variance s^2, has the chi-squared distribution of G - 1 degrees of
# freedom, so a spread counts as signal if noise would pass it with a probability below 1 in 1,000. AdamW moves the
# weights as far by a round of noise as by one of signal, however small the advantages: only leaving the group out
# helps.

MIN_SCORE_SPREAD = 1e-6  # judges are not exact to more digits
_Z = 3.09  # of a standard normal distribution, passed with a probability of 0.001 on one side
_Z_TWO_SIDED = 3.29


def has_signal(scores: Sequence[float], noise: float = 0.0) -> bool:
    """Whether the scores of a group differ by more than the judge's noise, so that training can use them."""
    if len(scores) < 2 or max(scores) - min(scores) <= MIN_SCORE_SPREAD:
        return False
    return statistics.stdev(scores) > noise * math.sqrt(_largest_ratio(len(scores) - 1))


def differs(score: float, mean: float, noise: float = 0.0) -> bool:
    """Whether a score differs from the mean of many earlier ones by more than the judge's noise."""
    return abs(score - mean) > max(MIN_SCORE_SPREAD, _Z_TWO_SIDED * noise)


def _largest_ratio(freedom: int) -> float:
    """Return the 0.999 quantile of chi-squared over its degrees of freedom: Wilson and Hilferty 1931, within 4%."""
    spread = 2 / (9 * freedom)
    return (1 - spread + _Z * math.sqrt(spread)) ** 3


# Welch's z for a change of a mean, and the two-proportion z for a change of a share. Pure.
#
# The sentinel needs the number of standard errors, not a p-value, and a result for constant values, for which
# scipy.stats.ttest_ind(equal_var=False) gives NaN or a warning.

MIN_VALUES = 16  # on either side; with fewer there is no result
MIN_SIGMAS = 4.0  # standard errors that a change exceeds before it raises an alarm


@dataclass(frozen=True, slots=True)
class MeanChange:
    """Means before and after, and their difference in standard errors (positive: it grew)."""

    before: float
    after: float
    sigmas: float

    @property
    def ratio(self) -> float:
        """The larger mean over the smaller one, at least 1."""
        low, high = sorted((abs(self.before), abs(self.after)))
        return high / low if low else math.inf if high else 1.0


def mean_change(past: Sequence[float], recent: Sequence[float]) -> MeanChange | None:
    """Return the change from past to recent values; None if either side has too few."""
    if min(len(past), len(recent)) < MIN_VALUES:
        return None
    before, after = statistics.fmean(past), statistics.fmean(recent)
    error = math.sqrt(statistics.variance(past) / len(past) + statistics.variance(recent) / len(recent))
    if error:
        return MeanChange(before, after, (after - before) / error)
    return MeanChange(before, after, math.copysign(math.inf, after - before) if after != before else 0.0)


def share_change(past: tuple[int, int], recent: tuple[int, int]) -> MeanChange | None:
    """Return the change of a share, given as (hits, total): the two-proportion z with a pooled standard error."""
    if min(past[1], recent[1]) < MIN_VALUES:
        return None
    before, after = past[0] / past[1], recent[0] / recent[1]
    pooled = (past[0] + recent[0]) / (past[1] + recent[1])
    error = math.sqrt(pooled * (1 - pooled) * (1 / past[1] + 1 / recent[1]))
    return MeanChange(before, after, (after - before) / error if error else 0.0)


# The sign-flip test of paired differences, by scipy, and Holm's correction, which scipy does not have.
#
# The test flips the signs of the differences (Fisher 1935). It is exact if they are symmetric under the null
# hypothesis, and asymptotically right otherwise (Romano 1990, JASA 85). Fewer than six tasks that differ cannot be
# significant at the 5% level.

_RESAMPLES = 9_999  # up to 13 differences, scipy tries all sign patterns instead
_BATCH_VALUES = 2_000_000  # values in memory at once, 16 MB
_SEED = 0  # equal differences give equal p-values


def check_scipy() -> None:
    """Raise TuningError if scipy is not installed: before a run spends rollouts that it could not compare."""
    if find_spec("scipy") is None:
        raise TuningError(f"comparing candidates needs scipy: {install_hint('trainer')}")


def sign_flip_p(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of the hypothesis that the mean difference is zero.

    Raises TuningError if scipy is not installed.
    """
    nonzero = [difference for difference in differences if difference]
    if len(nonzero) < 2:
        return 1.0  # either sign is as extreme; scipy refuses a sample of one
    check_scipy()
    import numpy
    from scipy.stats import permutation_test

    result = permutation_test(
        (numpy.array(nonzero),),
        numpy.sum,
        permutation_type="samples",
        vectorized=True,
        n_resamples=_RESAMPLES,
        batch=max(1, _BATCH_VALUES // len(nonzero)),
        rng=numpy.random.default_rng(_SEED),
    )
    return float(result.pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for multiple tests (Holm 1979, Scandinavian Journal of Statistics 6), in order."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    corrected = [1.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, p_values[index] * (len(p_values) - rank)))
        corrected[index] = highest
    return corrected


# Candidates compared on the same tasks: differences with intervals, and a ranking that tells ties as ties. Pure.
#
# Several attempts at a task are averaged first, so that the task is the unit, whatever the number of attempts. What
# went wrong stays in: a failed rollout counts as the failure score, and never as more than the lowest judged score;
# what the judge failed on is unjudged, never a number. Where there are unjudged attempts, the interval and the p-value
# hold whatever they would have got: both are the wider ones of two fillings, all against the candidate and all in its
# favour. One candidate is better than another where its interval excludes zero and its p-value, corrected by Holm over
# all pairs, is small enough; else they are tied, or inconclusive where unjudged attempts could change that.


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
