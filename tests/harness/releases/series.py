"""Plays series of versions under a release policy, and sums up what became of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.harness.releases.contenders import GuardedRelease, ReleaseContender, Rollback
from tests.harness.releases.world import HARMFUL_STEPS, PLANTED_AT, TURN, Luck, World, grown

_STALENESS = 8  # versions behind the newest one that a trajectory may be, to be trained


@dataclass
class Series:
    """One series. Times count trajectories; means are true ones. "false": the version taken back was no worse."""

    made: int = 0
    rollbacks: int = 0
    false_rollbacks: int = 0
    loss: float = 0.0  # a trajectory, against the best that could have been served
    average: float = 0.0  # true mean of what serves, a trajectory
    final: float = 0.0
    below_first: float = 0.0  # share of the time that what serves is below version 0
    loss_to_first: float = 0.0  # a trajectory
    not_newest: float = 0.0  # share of trajectories
    anchor_moves: int = 0
    found_after: dict[int, int] = field(default_factory=dict)  # by harmful version, from its first service
    served: set[int] = field(default_factory=set)
    harmful: dict[int, float] = field(default_factory=dict)  # made versions with a harmful step, and its size


def play(world: World, contender: ReleaseContender, seed: int) -> Series:
    """Play one series."""
    luck, result, means = Luck(world, seed), Series(), [world.mean]
    oracle, waiting, first_served = world.mean, 0.0, {0: 0}
    for at in range(0, world.trajectories, TURN):
        shares = contender.shares
        drawn = luck.draw(at, shares)
        scores = luck.scores(at, np.array(means)[drawn])
        served = sum(share * means[version] for version, share in shares.items())
        _tally(result, world, contender, shares, served, oracle)
        for step in luck.steps[1 + at // world.round_size : 1 + (at + TURN) // world.round_size]:
            oracle = grown(oracle, max(step, 0.0), world.mean)
        head, live = contender.head, contender.live
        for rollback in contender.observe(drawn.tolist(), scores.tolist(), at):
            _record(result, rollback, live, means, first_served, at + TURN)
            waiting = 0.0 if isinstance(contender, GuardedRelease) else waiting / 2
        waiting += TURN * sum(share for version, share in shares.items() if head - version <= _STALENESS)
        if waiting >= world.round_size and result.made < world.versions and contender.trains:
            result.made += 1
            step = float(luck.steps[result.made])
            if step < 0:
                result.harmful[result.made] = -step
            means.append(grown(means[contender.head], step, world.mean))
            contender.add(result.made)
            waiting = min(waiting - world.round_size, world.round_size)
        if contender.live not in first_served:
            since = max(version for version in first_served if version < contender.live)
            first_served |= dict.fromkeys(range(since + 1, contender.live + 1), at + TURN)
    result.final = means[contender.live]
    result.served = set(first_served)
    result.anchor_moves = contender.anchor_moves if isinstance(contender, GuardedRelease) else 0
    return result


def _tally(
    result: Series, world: World, contender: ReleaseContender, shares: dict[int, float], served: float, oracle: float
) -> None:
    weight = TURN / world.trajectories
    result.loss += (oracle - served) * weight
    result.average += served * weight
    result.loss_to_first += max(0.0, world.mean - served) * weight
    result.below_first += (served < world.mean - 1e-9) * weight
    result.not_newest += (1.0 - shares.get(contender.head, 0.0)) * weight


def _record(
    result: Series, rollback: Rollback, live: int, means: Sequence[float], first_served: dict[int, int], now: int
) -> None:
    first, target = rollback
    result.rollbacks += 1
    result.false_rollbacks += means[live] >= means[target] - 1e-9
    for version in result.harmful:
        if version >= first and version not in result.found_after:
            result.found_after[version] = now - first_served.get(version, now)


def summarize(world: World, played: Sequence[Series]) -> dict[str, float | None]:
    """Return the figures of many series."""
    mean = statistics.fmean
    figures: dict[str, float | None] = {
        "series_with_a_rollback": mean(one.rollbacks > 0 for one in played),
        "series_with_a_false_rollback": mean(one.false_rollbacks > 0 for one in played),
        "rollbacks": mean(one.rollbacks for one in played),
        "false_rollbacks": mean(one.false_rollbacks for one in played),
        "loss": mean(one.loss for one in played),
        "loss_error": statistics.pstdev(one.loss for one in played) / len(played) ** 0.5,
        "average": mean(one.average for one in played),
        "average_error": statistics.pstdev(one.average for one in played) / len(played) ** 0.5,
        "final": mean(one.final for one in played),
        "final_error": statistics.pstdev(one.final for one in played) / len(played) ** 0.5,
        "final_of_the_worst_5%": float(np.quantile([one.final for one in played], 0.05)),
        "below_first": mean(one.below_first for one in played),
        "loss_to_first": mean(one.loss_to_first for one in played),
        "not_newest": mean(one.not_newest for one in played),
        "made": mean(one.made for one in played),
        "anchor_moves": mean(one.anchor_moves for one in played),
    }
    for size in HARMFUL_STEPS:
        ours = [(one, v) for one in played for v, step in one.harmful.items() if abs(step - size) < 1e-9]
        ours = [(one, version) for one, version in ours if version in one.served]
        if ours:
            figures[f"found_{size:.2f}"] = mean(version in one.found_after for one, version in ours)
    if world.kind == "planted":
        times = [float(one.found_after.get(PLANTED_AT, 10**9)) for one in played if PLANTED_AT in one.served]
        found = [time for time in times if time < 10**9]
        figures |= {
            "found": len(found) / len(times) if times else None,
            "median": statistics.median(times) if len(found) > len(times) / 2 else None,
            "q90": q90 if times and (q90 := float(np.quantile(times, 0.9, method="lower"))) < 10**9 else None,
        }
    return figures


def play_many(world: World, make: Callable[[World], ReleaseContender], seeds: Sequence[int]) -> dict[str, float | None]:
    """Play a series for each seed, and sum them up."""
    return summarize(world, [play(world, make(world), seed) for seed in seeds])
