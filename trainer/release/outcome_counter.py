"""Counts the stored outcomes of trajectories as evidence about the releases of one alias.

The evidence is a function of what the store holds: the outcomes since the first release after the anchor, each counted
once, in the order of their start. After a restart, a rollback or a person's decision it is counted again, a bounded
number of outcomes at a time; `is_current` tells when it may be decided on.

A user or session draws its version once, so all its trajectories under the same shares are one bet: the mean of those
that began within `UNIT_SECONDS`; later ones say nothing new about the coin and are left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from statistics import fmean

from ratchet.store.records import ReleaseOutcome
from ratchet.store.store import Store
from ratchet.trainer.release.evidence import HarmEvidence, Outcome

UNIT_SECONDS = 3600.0
_PAGE = 500
_MAX_OUTCOMES = 2000  # in one call
_SCALE_SECONDS = 6 * 3600.0  # before the first release: for the scale of the scores
_RECENT = 512  # outcomes that the traffic is measured by

UnitDraw = tuple[str, tuple[tuple[int, float], ...]]


@dataclass(slots=True)
class _OpenUnit:
    """A user or session whose bet is not placed yet."""

    began_at: float
    members: list[Outcome] = field(default_factory=list)


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

    def begin_release(self, release: int) -> None:
        """Count for one more release, which has not served yet."""
        self.evidence.begin(release)

    def read(self, until: float) -> int:
        """Count the outcomes that were settled since, of trajectories that began before `until`; return how many."""
        read, self.is_current = 0, False
        while not self.is_current and read < _MAX_OUTCOMES:
            page = self._store.releases.outcomes(
                self._alias, self._judge_version, self._since, after=self._after, until=until,
                deadline_seconds=self._deadline_seconds, limit=_PAGE,
            )  # fmt: skip
            self.evidence.count(outcome for one in page for outcome in self._bets(one))
            read += len(page)
            self.is_current = len(page) < _PAGE
            if page:
                self._since, self._after = page[-1].started_at, page[-1].trajectory_id
        return read

    def per_day(self, now: float) -> float:
        """Return the number of scored trajectories a day, by the most recent ones."""
        if len(self._recent) < 2:
            return 0.0
        return len(self._recent) / max(1.0, now - self._recent[0]) * 86400.0

    def _bets(self, one: ReleaseOutcome) -> Sequence[Outcome]:
        """Return the outcomes that are counted once this one is read: units that are complete, then itself."""
        complete = [key for key, unit in self._units.items() if unit and one.started_at > unit.began_at + UNIT_SECONDS]
        found = [self._close(key) for key in complete]
        outcome = self._outcome(one)
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

    def _outcome(self, one: ReleaseOutcome) -> Outcome | None:
        """Return what a stored outcome counts for; None if its version was rejected, which no release is bet on."""
        shares = {version: share for version, share in one.shares.items() if version not in self._rejected}
        if one.version not in shares:
            return None
        score = one.score
        if score is None and not one.finished:
            score = self._lowest
        self._lowest = min(self._lowest, score or 0.0)
        return Outcome(
            one.version,
            shares,
            score,
            sum(one.group_scores),
            len(one.group_scores),
            float(one.finished and one.score is not None),
            one.failed_calls / one.calls if one.calls else 0.0,
        )
