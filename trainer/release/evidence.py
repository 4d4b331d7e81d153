"""Evidence of harm: for each release, a bet that the version before it does better. Pure.

Each new trajectory draws its version by a coin whose probabilities were recorded. For a score y of a trajectory that
drew the older version (Z = 1) or a newer one (Z = 0), the older one with probability f:

    m  = what was expected without y     the other scores of its group and one running mean; alone: the running mean
    r  = (y - m) / s, between -3 and 3   s: the running standard deviation of earlier residuals
    u  = (Z - f) r                       positive when the older version does better
    W  = W (1 + l u)                     the wealth of a bettor who stakes the share l; one for each of `BET_SIZES`
    E  = the mean of the wealths

If both versions behave alike, only the coin is random, so E is a non-negative martingale that begins at 1, and the
probability that it ever reaches 1/alpha is at most alpha (Ville's inequality): after every score, for any scores, any
drift of tasks or judge that the versions share, and any change of the shares that follows from the past.

Three streams are bet on: the score, whether the trajectory was finished and judged, and the share of failed calls. The
evidence of a release is their weighted mean, which is again such a martingale, so they share one alpha.

A release is compared with the newest older version that served beside it: in its ramp with the previous one, later
with the anchor. All newer versions count as one side. The opposite bet, that everything since the anchor does better
than the anchor, moves the anchor.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

BET_SIZES = (0.02, 0.04, 0.08, 0.16, 0.32, 0.64)
STREAMS = (("score", 0.8), ("finished", 0.1), ("errors", 0.1))  # and their weights in the evidence
_MAX_RESIDUAL = 3.0  # standard deviations
_MAX_LOSS = 0.9  # of a bettor's wealth, in one bet
_MAX_WEALTH = 1e12
_MEAN_OVER, _SPREAD_OVER = 256, 512  # outcomes that the running mean and standard deviation look back on
_MIN_VARIANCE = 1e-18
_FIRST_OUTCOMES = 8  # are not bet on: the scale of the scores is not known yet

# The older version, the oldest of the newer ones that served beside it, and the probability of the older one.
Comparison = tuple[int, int, float]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a trajectory, or several of one user or session, came to.

    shares       of new trajectories by version, when this one drew its version
    score        the worst score if it was unfinished; None if it is not known; a mean for several trajectories
    peer_sum     sum of the scores of the other members of its group, and their number
    finished     whether it was finished and judged (a share, for several trajectories)
    error_rate   share of its calls that failed
    """

    version: int
    shares: Mapping[int, float]
    score: float | None
    peer_sum: float = 0.0
    peer_count: int = 0
    finished: float = 1.0
    error_rate: float = 0.0


class Bet:
    """The wealth of bettors with different stakes; the value is their mean, 1 at the start."""

    __slots__ = ("value", "wealth")

    def __init__(self) -> None:
        self.wealth = [1.0] * len(BET_SIZES)
        self.value = 1.0

    def multiply(self, factors: Sequence[float]) -> None:
        """Multiply the wealth of each bettor."""
        self.wealth = [min(one * factor, _MAX_WEALTH) for one, factor in zip(self.wealth, factors, strict=True)]
        self.value = sum(self.wealth) / len(self.wealth)


class RunningScale:
    """Running mean of one stream and running standard deviation of its residuals, from earlier outcomes only."""

    __slots__ = ("count", "mean", "variance")

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.variance = 0.0

    def centre(self, peer_sum: float, peer_count: int) -> float:
        """Return what is expected of a value, from earlier outcomes and the other members of its group."""
        return (self.mean + peer_sum) / (peer_count + 1)

    def residual(self, value: float, centre: float) -> float:
        """Return value - centre in standard deviations, then learn from it; 0 while the scale is unknown."""
        residual, earlier = value - centre, self.variance
        known = self.count >= _FIRST_OUTCOMES and earlier > _MIN_VARIANCE
        self.count += 1
        self.mean += (value - self.mean) / min(self.count, _MEAN_OVER)
        if self.count > 1:
            self.variance += (residual * residual - earlier) / min(self.count - 1, _SPREAD_OVER)
        if not known or residual == 0.0:
            return 0.0
        return max(-_MAX_RESIDUAL, min(_MAX_RESIDUAL, residual / math.sqrt(earlier)))


class DifferenceSums:
    """Sums for the mean score of newer versions minus that of an older one, from the residuals of the bets."""

    __slots__ = ("count", "information", "squares", "sum")

    def __init__(self) -> None:
        self.count = 0
        self.sum = 0.0
        self.squares = 0.0
        self.information = 0.0

    def add(self, version: int, compared: Comparison, residual: float) -> None:
        """Count a trajectory of a version, with its residual in units of the score."""
        older, _, f = compared
        if version >= older:
            u = ((version == older) - f) * residual
            self.count += 1
            self.sum += u
            self.squares += u * u
            self.information += f * (1.0 - f)


class HarmEvidence:
    """The evidence about all releases since the anchor, and for moving the anchor. Grows outcome by outcome.

    Which outcomes are counted, and in which order, is the caller's: each one once, in the order of their start.
    """

    def __init__(self, anchor: int, *, relative: bool = False) -> None:
        self.anchor = anchor
        self.counted = 0
        self.counted_in_ramp: dict[int, int] = {}  # by release: outcomes in whose draw it was the newest
        self.anchor_difference = DifferenceSums()  # everything since the anchor
        self.ramp_differences: dict[int, DifferenceSums] = {}  # each release and the version before it
        self._relative = relative  # scores compare members of one group only
        self._harm: dict[int, dict[str, Bet]] = {}
        self._gain = Bet()
        self._pending: defaultdict[tuple[str, Comparison], list[float]] = defaultdict(list)  # u, not yet bet on
        self._scales = {stream: RunningScale() for stream, _ in STREAMS}

    @property
    def releases(self) -> list[int]:
        """The releases since the anchor, oldest first."""
        return sorted(self._harm)

    @property
    def spread(self) -> float:
        """The standard deviation of the scores that is left after what was expected of them."""
        return math.sqrt(self._scales["score"].variance)

    @property
    def anchor_gain(self) -> float:
        """The evidence that everything since the anchor does better than the anchor."""
        return self._gain.value

    def begin(self, release: int) -> None:
        """Begin the evidence about a version that begins its ramp."""
        self._harm[release] = {stream: Bet() for stream, _ in STREAMS}
        self.counted_in_ramp[release] = 0
        self.ramp_differences[release] = DifferenceSums()

    def reject(self, first: int) -> None:
        """Forget this release and all newer ones: they were rolled back."""
        for release in [release for release in self._harm if release >= first]:
            del self._harm[release], self.counted_in_ramp[release], self.ramp_differences[release]

    def move_anchor(self, version: int) -> None:
        """Compare with another anchor from now on."""
        self.anchor = version
        self._gain = Bet()
        self.anchor_difference = DifferenceSums()
        for release in [release for release in self._harm if release <= version]:
            del self._harm[release], self.counted_in_ramp[release], self.ramp_differences[release]

    def harm(self, release: int) -> float:
        """Return the evidence that the versions before this release do better; 1 for an unknown one."""
        bets = self._harm.get(release)
        return sum(bets[stream].value * weight for stream, weight in STREAMS) if bets else 1.0

    def harm_by_stream(self, release: int) -> dict[str, float]:
        """Return the evidence by stream."""
        return {stream: bet.value for stream, bet in self._harm.get(release, {}).items()}

    def count(self, outcomes: Iterable[Outcome]) -> None:
        """Count outcomes."""
        for outcome in outcomes:
            comparisons = _comparisons(tuple(sorted(outcome.shares.items())))
            if outcome.score is not None:
                self._count_score(outcome, outcome.score, comparisons)
            for stream, value in (("finished", outcome.finished), ("errors", -outcome.error_rate)):
                scale = self._scales[stream]
                self._bet(stream, outcome.version, comparisons, scale.residual(value, scale.mean))
        self._place_bets()

    def _count_score(self, outcome: Outcome, score: float, comparisons: Sequence[Comparison]) -> None:
        self.counted += 1
        newest = max(outcome.shares)
        if newest in self.counted_in_ramp:
            self.counted_in_ramp[newest] += 1
        scale = self._scales["score"]
        if self._relative:  # by the ranks of its own group alone; given them, only the coins are random
            centre = (outcome.peer_sum + score) / (outcome.peer_count + 1)
        else:
            centre = scale.centre(outcome.peer_sum, outcome.peer_count)
        self._bet("score", outcome.version, comparisons, scale.residual(score, centre))
        if comparisons and comparisons[0][0] == self.anchor:
            self.anchor_difference.add(outcome.version, comparisons[0], score - centre)
        if comparisons and newest in self.ramp_differences:
            self.ramp_differences[newest].add(outcome.version, comparisons[-1], score - centre)

    def _bet(self, stream: str, version: int, comparisons: Sequence[Comparison], residual: float) -> None:
        if not residual:
            return
        for compared in comparisons:
            older, _, f = compared
            if version >= older:
                u = ((version == older) - f) * residual
                self._pending[stream, compared].append(u)
                if stream == "score" and compared is comparisons[0] and older == self.anchor:
                    self._pending["gain", compared].append(-u)

    def _place_bets(self) -> None:
        for (stream, (older, newer, f)), outcomes in self._pending.items():
            factors = [math.prod([1.0 + size * u for u in outcomes]) for size in _sizes(f)]
            if stream == "gain":
                self._gain.multiply(factors)
                continue
            for release, bets in self._harm.items():
                if older < release <= newer:
                    bets[stream].multiply(factors)
        self._pending.clear()


@lru_cache(maxsize=1024)
def _comparisons(shares: tuple[tuple[int, float], ...]) -> tuple[Comparison, ...]:
    """Return each version with all newer ones, for shares in the order of the versions."""
    found = []
    for i, ((older, share), (newer, _)) in enumerate(pairwise(shares)):
        rest = sum(later for _, later in shares[i + 1 :])
        found.append((older, newer, share / (share + rest)))
    return tuple(found)


@lru_cache(maxsize=1024)
def _sizes(f: float) -> Sequence[float]:
    """Return the bet sizes with which no bet can lose more than `_MAX_LOSS`, for a probability of the older side."""
    most = _MAX_LOSS / (_MAX_RESIDUAL * max(f, 1.0 - f))
    return tuple(min(size, most) for size in BET_SIZES)
