"""A stream of scored trajectories, served by versions whose true means are known.

Every `round_size` usable trajectories, training makes a version on top of the newest one that is not rejected; its true
mean is its parent's plus a step of luck. Everything is counted in scored trajectories; days are trajectories divided by
`per_day`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr, ndtri

TURN = 32  # trajectories between two looks of the controller
GROUP = 8
HARMFUL_STEPS = (0.02, 0.05, 0.10, 0.30)
PLANTED_AT = 10  # the version with the harmful step, in a planted series
_CEILING, _FLOOR = 0.97, 0.03


@dataclass(frozen=True)
class World:
    """kind: equal (all versions alike), planted (one harmful step among equal ones), mixed, plateau (gains a tenth)."""

    kind: str = "mixed"
    size: float = 0.1  # of the planted step
    mean: float = 0.5  # of version 0
    score: str = "binary"  # or "continuous", with a standard deviation of 0.25
    grouped: bool = True  # groups of 8 of one task, else single trajectories
    round_size: int = 256
    per_day: float = 300.0
    lag_minutes: float = 15.0  # until a trajectory is finished and judged
    versions: int = 50
    harmful: float = 0.15  # share of harmful steps
    growth: float = 0.0  # a gain is (round_size / 256) ** growth times as large
    drift: float = 0.3  # common to all versions
    length: float = 1.0  # of the series, in versions * round_size trajectories

    @property
    def trajectories(self) -> int:
        return int(self.versions * self.round_size * self.length) // TURN * TURN


class Luck:
    """The luck of one series: the same for every policy that is compared."""

    def __init__(self, world: World, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.world = world
        self.steps = _steps(world, random)
        count = world.trajectories
        tasks = random.standard_normal(count // GROUP if world.grouped else count)
        self._task = np.repeat(tasks, GROUP) if world.grouped else tasks
        self._coin = random.random(count)
        self._noise = random.random(count) if world.score == "binary" else random.standard_normal(count)

    def draw(self, start: int, shares: dict[int, float]) -> np.ndarray:
        """Return the version of each trajectory of a turn."""
        versions = np.array(list(shares))
        bounds = np.cumsum(list(shares.values()))[:-1]
        drawn: np.ndarray = versions[np.searchsorted(bounds, self._coin[start : start + TURN], side="right")]
        return drawn

    def scores(self, start: int, means: np.ndarray) -> np.ndarray:
        """Return the score of each trajectory of a turn, from the true means of the versions that they drew."""
        day, turn = start / self.world.per_day, slice(start, start + TURN)
        drift = self.world.drift * (math.sin(2 * math.pi * day / 7) + 0.5 * math.sin(2 * math.pi * day / 41)) / 1.5
        task, noise = self._task[turn], self._noise[turn]
        if self.world.score == "binary":
            scores: np.ndarray = (noise < ndtr(_latent(means) + task + drift)).astype(float)
        else:
            scores = means + 0.15 * task + 0.2 * noise + 0.15 * drift
        return scores


def grown(mean: float, step: float, first: float) -> float:
    """Return the mean of a version after a step on top of another; gains shrink towards the ceiling."""
    capacity = min(1.0, max(0.0, (_CEILING - mean) / (_CEILING - first)))
    return max(mean + (step * capacity if step > 0 else step), _FLOOR)


def _steps(world: World, random: np.random.Generator) -> np.ndarray:
    """Return the step of each version, version 0 included."""
    number = world.versions + 1
    if world.kind in ("equal", "planted"):
        steps = np.zeros(number)
        if world.kind == "planted":
            steps[PLANTED_AT] = -world.size
        return steps
    kind = random.random(number)
    gain = random.uniform(0.01, 0.03, number) * (0.1 if world.kind == "plateau" else 1.0)
    gain *= (world.round_size / 256) ** world.growth
    harm = -random.choice(HARMFUL_STEPS, number)
    return np.where(kind < world.harmful, harm, np.where(kind < world.harmful + 0.7, gain, 0.0))


def _latent(means: np.ndarray) -> np.ndarray:
    latent: np.ndarray = ndtri(np.clip(means, 0.01, 0.99)) * math.sqrt(2.0)
    return latent
