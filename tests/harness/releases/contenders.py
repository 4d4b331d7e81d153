"""The release policies that are compared: none, a fixed A/B test, the gate that Ratchet had before, and the product's.

The first three see scores without any lag, which favours them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from ratchet.trainer.release.evidence import HarmEvidence, Outcome
from ratchet.trainer.release.policy import ReleaseAction, ReleaseDecision, ReleaseRules, ReleaseState, decide, shares_of
from ratchet.trainer.statistics import boundary
from tests.harness.releases.world import GROUP, TURN, World

Rollback = tuple[int, int]  # the first version that is rejected, and the one that serves in its place


class ReleaseContender(Protocol):
    """A release policy in a simulated series. Versions are numbered from 0."""

    head: int  # the version that training builds on

    @property
    def live(self) -> int:
        """The newest version that was released, one in its ramp included."""

    @property
    def shares(self) -> dict[int, float]:
        """The share of new trajectories of each version."""

    @property
    def trains(self) -> bool:
        """Whether training may go on."""

    def add(self, version: int) -> None:
        """Hear of a new version."""

    def observe(self, versions: Sequence[int], scores: Sequence[float], at: int) -> list[Rollback]:
        """Count a turn of trajectories and decide; return the rollbacks."""


class Ungated:
    """Every version is live at once."""

    def __init__(self) -> None:
        self.head = self.live = 0

    @property
    def shares(self) -> dict[int, float]:
        return {self.head: 1.0}

    @property
    def trains(self) -> bool:
        return True

    def add(self, version: int) -> None:
        self.head = self.live = version

    def observe(self, versions: Sequence[int], scores: Sequence[float], at: int) -> list[Rollback]:
        return []


class GuardedRelease:
    """The product's policy, over its own decision code."""

    def __init__(self, world: World, rules: ReleaseRules | None = None) -> None:
        self.head = 0
        self.rules = rules or ReleaseRules()
        self.anchor_moves = 0
        self._world = world
        self._evidence = HarmEvidence(0)
        self._released, self._ramp = 0, None  # type: int, int | None
        self._shares: dict[int, float] = {0: 1.0}
        self._lag = int(world.per_day * world.lag_minutes / 1440.0) // TURN
        self._unjudged: deque[list[Outcome]] = deque()

    @property
    def live(self) -> int:
        return self._released if self._ramp is None else self._ramp

    @property
    def anchor(self) -> int:
        return self._evidence.anchor

    @property
    def shares(self) -> dict[int, float]:
        return self._shares

    @property
    def trains(self) -> bool:
        return True

    def add(self, version: int) -> None:
        self.head = version

    def observe(self, versions: Sequence[int], scores: Sequence[float], at: int) -> list[Rollback]:
        self._unjudged.append(_outcomes(versions, scores, self._shares, self._world.grouped))
        if len(self._unjudged) > self._lag:
            self._evidence.count(self._unjudged.popleft())
        rollbacks = []
        while (decision := decide(self._state(), self.rules)).action is not ReleaseAction.WAIT:
            rollbacks += self._apply(decision)
        return rollbacks

    def _state(self) -> ReleaseState:
        evidence = self._evidence
        return ReleaseState(
            anchor=evidence.anchor,
            live=self._released,
            ramp=self._ramp,
            candidate=self.head if self.head > self._released else None,
            ramp_counted=evidence.counted_in_ramp.get(self._ramp, 0) if self._ramp is not None else 0,
            round_size=self._world.round_size,
            harm={release: evidence.harm(release) for release in evidence.releases},
            anchor_gain=evidence.anchor_gain,
            shares=self._shares,
        )

    def _apply(self, decision: ReleaseDecision) -> list[Rollback]:
        version, rollbacks = decision.version, []
        assert version is not None
        match decision.action:
            case ReleaseAction.ROLLBACK:
                assert decision.target is not None
                self._evidence.reject(decision.target + 1)
                self.head = self._released = decision.target
                self._ramp = None
                rollbacks = [(decision.target + 1, decision.target)]
            case ReleaseAction.MOVE_ANCHOR:
                self._evidence.move_anchor(version)
                self.anchor_moves += 1
            case ReleaseAction.END_RAMP:
                self._released, self._ramp = version, None
            case ReleaseAction.BEGIN_RAMP:
                self._evidence.begin(version)
                self._ramp = version
        harm = self._evidence.harm(self._released)
        self._shares = shares_of(self._evidence.anchor, self._released, self._ramp, harm, self.rules)
        return rollbacks


class _TwoSided:
    """A new version beside the live one; training waits for the decision."""

    def __init__(self, share: float) -> None:
        self.head = self.live = self._old = 0
        self._share = share
        self._begin()

    @property
    def shares(self) -> dict[int, float]:
        return {self._old: 1.0 - self._share, self.live: self._share} if self._is_testing else {self.live: 1.0}

    @property
    def trains(self) -> bool:
        return not self._is_testing

    @property
    def _is_testing(self) -> bool:
        return self.live != self._old

    def add(self, version: int) -> None:
        self.head = version

    def _begin(self) -> None:
        self._count, self._sum, self._squares = [0, 0], [0.0, 0.0], [0.0, 0.0]
        self._low, self._high, self._seen = math.inf, -math.inf, 0

    def observe(self, versions: Sequence[int], scores: Sequence[float], at: int) -> list[Rollback]:
        rollbacks: list[Rollback] = []
        if self._is_testing:
            self._seen += len(scores)
            for version, score in zip(versions, scores, strict=True):
                side = 0 if version == self.live else 1
                self._count[side] += 1
                self._sum[side] += score
                self._squares[side] += score * score
                self._low, self._high = min(self._low, score), max(self._high, score)
            passed = self._passes()
            if passed is False:
                rollbacks = [(self.live, self._old)]
                self.live = self.head = self._old
            elif passed:
                self._old = self.live
        if not self._is_testing and self.head > self.live:
            self.live = self.head
            self._begin()
        return rollbacks

    def _passes(self) -> bool | None:
        raise NotImplementedError


class FixedTest(_TwoSided):
    """200 trajectories a side, then a one-sided z-test at 5%."""

    def __init__(self) -> None:
        super().__init__(0.5)

    def _passes(self) -> bool | None:
        if min(self._count) < 200:
            return None
        means = [total / count for total, count in zip(self._sum, self._count, strict=True)]
        variances = [
            squares / count - mean * mean
            for squares, count, mean in zip(self._squares, self._count, means, strict=True)
        ]
        error = math.sqrt(sum(variance / count for variance, count in zip(variances, self._count, strict=True)))
        return means[0] - means[1] >= -1.645 * error


class FormerGate(_TwoSided):
    """The gate until 2026-11, with its defaults: a confidence sequence, and the mean after 200 scores or a day."""

    def __init__(self, world: World) -> None:
        super().__init__(0.2)
        self._per_day = world.per_day

    def _passes(self) -> bool | None:
        late = self._seen >= self._per_day
        if min(self._count) < 20:
            return False if late else None
        n, m = self._count
        value = self._sum[0] / n - self._sum[1] / m
        effective = n * m / (n + m)
        variance = sum(self._variance(side) / self._count[side] for side in (0, 1)) * effective
        radius = math.sqrt(max(0.0, variance)) * boundary(effective, 0.05)
        if value + radius < 0:
            return False
        if value - radius > -0.02:
            return True
        if not late and n < 200:
            return None
        return value >= -0.02

    def _variance(self, side: int) -> float:
        low = self._low if self._high > self._low else self._high - 1.0
        mean = self._sum[side] / self._count[side]
        far = self._high if self._high - mean > mean - low else low
        count = self._count[side] + 1
        mean = (self._sum[side] + far) / count
        return (self._squares[side] + far * far - count * mean * mean) / (count - 1)


def _outcomes(
    versions: Sequence[int], scores: Sequence[float], shares: Mapping[int, float], grouped: bool
) -> list[Outcome]:
    if not grouped:
        return [Outcome(version, shares, score) for version, score in zip(versions, scores, strict=True)]
    found = []
    for first in range(0, len(scores), GROUP):
        group = scores[first : first + GROUP]
        total = sum(group)
        found += [
            Outcome(version, shares, score, total - score, GROUP - 1)
            for version, score in zip(versions[first : first + GROUP], group, strict=True)
        ]
    return found
