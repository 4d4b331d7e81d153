"""What is recorded about a release, and the outcomes of trajectories that it is counted from."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from ratchet.store.policies.serving import ServingVersions
from ratchet.store.records import Policy, ReleaseOutcome
from ratchet.store.store import Store
from ratchet.trainer.release.evidence import DifferenceSums, HarmEvidence, Outcome
from ratchet.trainer.release.policy import ReleaseRules
from ratchet.trainer.statistics import MeanDifference, boundary

# Which loss the evidence can show after how many trajectories, and the difference from the anchor. Pure.
#
# The median number of counted trajectories until a loss D is shown is 18 s^2 / (f (1 - f) D^2): twice ln(1/alpha) + 2,
# for alpha 0.001, with s the standard deviation that is left after the baseline, and f the share of the older of two
# versions. One loss in ten takes twice as long. `benchmarks/release.py` measures both.

PERIODS = (("day", 1.0), ("week", 7.0), ("month", 30.0))
SMALL_TRAFFIC_LOSS = 0.1  # a larger one that a month cannot show: the traffic is too small to guard by itself
_CERTAINTY = 18.0
_MIN_COUNT = 20
_MIN_ROUND, _MAX_ROUND = 128, 512  # trajectories


def mean_difference(seen: DifferenceSums, alpha: float = 0.05) -> MeanDifference | None:
    """Return newer minus older; None for fewer than twenty trajectories."""
    if seen.count < _MIN_COUNT or seen.information <= 0.0:
        return None
    value = -seen.sum / seen.information
    mean = seen.sum / seen.count
    spread = math.sqrt(max(0.0, seen.squares / seen.count - mean * mean))
    radius = spread * boundary(seen.count, alpha) * seen.count / seen.information
    return MeanDifference(value, value - radius, value + radius, seen.count)


def detectable_loss(per_day: float, days: float, spread: float, older: float, newer: float) -> float:
    """Return the loss that is shown in `days` in the median, for two versions with these shares of all traffic."""
    trajectories = per_day * days * (older + newer)
    if trajectories <= 0.0 or older <= 0.0 or newer <= 0.0:
        return math.inf
    f = older / (older + newer)
    return spread * math.sqrt(_CERTAINTY / (f * (1.0 - f) * trajectories))


def is_traffic_too_small(per_day: float, spread: float, holdback: float = 0.3) -> bool:
    """Return whether a month of this traffic cannot show a loss of `SMALL_TRAFFIC_LOSS` against the anchor."""
    return detectable_loss(per_day, 30.0, spread, holdback, 1.0 - holdback) > SMALL_TRAFFIC_LOSS


def deserved_round_size(per_day: float) -> int:
    """Return a day of traffic, between 128 and 512 trajectories.

    A release is judged by about as many trajectories as its round has, so a larger round makes one that can be judged,
    but fewer of them. `benchmarks.release --only rounds` measures what that is worth.
    """
    return round(max(_MIN_ROUND, min(_MAX_ROUND, per_day)))


# What is recorded about a release, with each decision and for people (docs/release.md lists the keys). Pure.


def decision_evidence(evidence: HarmEvidence, judge_version: str) -> dict[str, Any]:
    """Return the evidence that a decision is made on."""
    gain = mean_difference(evidence.anchor_difference)
    return {
        "judge_version": judge_version,
        "anchor": evidence.anchor,
        "harm": {str(release): evidence.harm(release) for release in evidence.releases},
        "anchor_gain": evidence.anchor_gain,
        "counted": evidence.counted,
        "live_minus_anchor": asdict(gain) if gain is not None else None,
    }


def describe_release(
    policy: Policy,
    serving: ServingVersions,
    evidence: HarmEvidence,
    rules: ReleaseRules,
    round_size: int,
    per_day: float,
) -> dict[str, Any]:
    """Return what is known about a version that serves.

    `harm` is the evidence that the versions before it do better; at `enough` it is rolled back. `detectable` is the
    loss that the holdback shows in the median, by period; None while no score is known.
    """
    anchor = serving.anchor.version if serving.anchor is not None else evidence.anchor
    difference, spread = mean_difference(evidence.anchor_difference), evidence.spread
    known = spread > 0.0 and per_day > 0.0
    losses = {
        name: detectable_loss(per_day, days, spread, rules.holdback, 1.0 - rules.holdback) for name, days in PERIODS
    }
    return {
        "harm": evidence.harm(policy.version),
        "streams": evidence.harm_by_stream(policy.version),
        "enough": 1.0 / rules.alpha,
        "counted": evidence.counted_in_ramp.get(policy.version, 0),
        "ramp_length": rules.ramp_length(round_size),
        "anchor": anchor,
        "anchor_gain": evidence.anchor_gain,
        "live_minus_anchor": asdict(difference) if difference is not None else None,
        "per_day": per_day,
        "spread": spread,
        "detectable": losses if known else None,
        "traffic_too_small": is_traffic_too_small(per_day, spread) if known else None,
        "deserved_round_size": deserved_round_size(per_day) if known else None,
        "round_size": round_size,
    }


# Counts the stored outcomes of trajectories as evidence about the releases of one alias.
#
# The evidence is a function of what the store holds: the outcomes since the first release after the anchor, each
# counted once, in the order of their start. After a restart, a rollback or a person's decision it is counted again, a
# bounded number of outcomes at a time; `is_current` tells when it may be decided on.
#
# An outcome waits for all trajectories that began before it. So that one that hangs does not hold up the others for
# hours, a trajectory may take ten times as long as nine in ten of those counted before it, at least 15 minutes and at
# most `deadline_seconds`. What takes longer counts as the worst score, also if it ends well after all. The deadline
# follows from earlier trajectories alone, so given the past a trajectory's coin is still the only thing that is random.
#
# A user or session draws its version once, so all its trajectories under the same shares are one bet: the mean of those
# that began within `UNIT_SECONDS`; later ones say nothing new about the coin and are left out.

UNIT_SECONDS = 3600.0
_PAGE = 500
_MAX_OUTCOMES = 2000  # in one call
_SCALE_SECONDS = 6 * 3600.0  # before the first release: for the scale of the scores
_RECENT = 512  # outcomes that the traffic and the usual duration are measured by
_MIN_DEADLINE_SECONDS = 900.0
_USUAL, _TIMES_USUAL = 0.9, 10.0  # quantile of the durations, and how many times that a trajectory may take
_MIN_DURATIONS = 20

UnitDraw = tuple[str, tuple[tuple[int, float], ...]]


@dataclass(slots=True)
class _OpenUnit:
    """A user or session whose bet is not placed yet."""

    began_at: float
    members: list[Outcome] = field(default_factory=list)


class UsualDuration:
    """How long the last trajectories took, and how long one may take."""

    def __init__(self, deadline_seconds: float) -> None:
        self._deadline_seconds = deadline_seconds
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    @property
    def deadline(self) -> float:
        """Seconds after its start until which a trajectory may be under way."""
        if len(self._sorted) < _MIN_DURATIONS:
            return self._deadline_seconds
        usual = self._sorted[int(_USUAL * (len(self._sorted) - 1))]
        return min(self._deadline_seconds, max(_MIN_DEADLINE_SECONDS, _TIMES_USUAL * usual))

    def add(self, seconds: float) -> None:
        """Count a duration, a longer one than the deadline as the deadline."""
        seconds = min(seconds, self.deadline)
        self._recent.append(seconds)
        insort(self._sorted, seconds)
        if len(self._recent) > _RECENT:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]


class OutcomeCounter:
    """The evidence about the releases of one alias, read from the store."""

    def __init__(
        self, store: Store, alias: str, judge_version: str, *, relative: bool, deadline_seconds: float
    ) -> None:
        self._store = store
        self._alias = alias
        self._judge_version = judge_version
        self._relative = relative
        self._deadline_seconds = deadline_seconds
        self._recent: deque[float] = deque(maxlen=_RECENT)  # when scored trajectories began
        self.begin(0, {}, frozenset(), 0.0)

    def begin(self, anchor: int, releases: Mapping[int, float], rejected: Set[int], now: float) -> None:
        """Count from the start, for an anchor and the releases since then, by the time of their first service."""
        self.evidence = HarmEvidence(anchor, relative=self._relative)
        for release in sorted(releases):
            self.evidence.begin(release)
        self.is_current = False
        self._rejected = rejected
        self._since = max(0.0, min(releases.values(), default=now) - _SCALE_SECONDS)
        self._after = ""
        self._lowest = 0.0  # score so far
        self._units: dict[UnitDraw, _OpenUnit | None] = {}  # None: its bet is placed
        self._recent.clear()
        self._usual = UsualDuration(self._deadline_seconds)

    def begin_release(self, release: int) -> None:
        """Count for one more release, which has not served yet."""
        self.evidence.begin(release)

    def read(self, until: float) -> int:
        """Count the outcomes that were settled since, of trajectories that began before `until`; return how many."""
        read, self.is_current = 0, False
        while not self.is_current and read < _MAX_OUTCOMES:
            deadline = self._usual.deadline
            page = self._store.releases.outcomes(
                self._alias, self._judge_version, self._since, after=self._after, until=until,
                deadline_seconds=self._deadline_seconds, open_seconds=deadline, limit=_PAGE,
            )  # fmt: skip
            bets: list[Outcome] = []
            counted = 0
            for one in page:
                if one.seconds is None and until - one.started_at < self._usual.deadline:
                    break
                bets += self._bets(one)
                counted += 1
                self._since, self._after = one.started_at, one.trajectory_id
            self.evidence.count(bets)
            read += counted
            self.is_current = counted < _PAGE and self._usual.deadline >= deadline  # else more of them may be overdue
        return read

    def per_day(self, now: float) -> float:
        """Return the number of scored trajectories a day, by the most recent ones."""
        if len(self._recent) < 2:
            return 0.0
        return len(self._recent) / max(1.0, now - self._recent[0]) * 86400.0

    def _bets(self, one: ReleaseOutcome) -> Sequence[Outcome]:
        """Return the outcomes that are counted once this one is read: units that are complete, then itself."""
        in_time = one.seconds is not None and one.seconds <= self._usual.deadline
        self._usual.add(math.inf if one.seconds is None else one.seconds)
        complete = [key for key, unit in self._units.items() if unit and one.started_at > unit.began_at + UNIT_SECONDS]
        found = [self._close(key) for key in complete]
        outcome = self._outcome(one, is_finished=one.finished and in_time)
        if outcome is None:
            return found
        if one.score is not None:
            self._recent.append(one.started_at)
        if one.unit is None:
            return [*found, outcome]
        key = one.unit, tuple(sorted(outcome.shares.items()))
        unit = self._units.setdefault(key, _OpenUnit(one.started_at))
        if unit is not None:
            unit.members.append(outcome)
        return found

    def _close(self, key: UnitDraw) -> Outcome:
        unit, self._units[key] = self._units[key], None
        assert unit is not None
        members = unit.members
        scores = [one.score for one in members if one.score is not None]
        peers = [(one.peer_sum / one.peer_count, 1) for one in members if one.peer_count]
        return Outcome(
            members[0].version,
            members[0].shares,
            fmean(scores) if scores else None,
            fmean(mean for mean, _ in peers) if peers else 0.0,
            1 if peers else 0,
            fmean(one.finished for one in members),
            fmean(one.error_rate for one in members),
        )

    def _outcome(self, one: ReleaseOutcome, *, is_finished: bool) -> Outcome | None:
        """Return what a stored outcome counts for; None if its version was rejected, which no release is bet on."""
        shares = {version: share for version, share in one.shares.items() if version not in self._rejected}
        if one.version not in shares:
            return None
        score = one.score if is_finished else self._lowest
        self._lowest = min(self._lowest, score or 0.0)
        return Outcome(
            one.version,
            shares,
            score,
            sum(one.group_scores),
            len(one.group_scores),
            float(is_finished and one.score is not None),
            one.failed_calls / one.calls if one.calls else 0.0,
        )
