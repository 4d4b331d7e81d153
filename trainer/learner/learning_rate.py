"""The learning rate that steers itself: how far a round moved the policy decides how far the next one steps. Pure.

A useful rate differs by a factor of a thousand between models; how far a good round moves its policy does not. The
movement is the k3 estimator of the KL from the new policy to the old one at the round's own trained tokens, mean of
exp(g) - 1 - g with g = log p_new - log p_old (Schulman 2020, "Approximating KL divergence"). It grows with the square
of a small step, so that

    rate of the next round = rate * sqrt(target / k3)

outside a dead band of a factor of two on each side (k3 has a heavy tail), at most four times as much a round, down by
any amount, within `bounds`. The target falls with the policy's entropy: a policy that has made up its mind moves less
at the same rate, and a constant target would drive the rate into its bound (measured on the e-mail example). Adaptive
rates of this kind are usual in PPO for robots (rsl_rl's `desired_kl`).

Whatever decides is part of the state, which stands in the checkpoint: a resumed learner steps as the one that never
stopped, and one that goes back to an earlier version goes back to its rate. Does not measure anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ratchet.trainer.settings.learner_settings import AUTO

if TYPE_CHECKING:
    from ratchet.trainer.settings.learner_settings import LearnerSettings


# Mean k3 that rounding alone shows after any step, by the numbers that the model computes in: bf16 as measured on the
# tiny policy (4e-5 to 6e-5; deeper models presumably show more), fp32 as no step that was measured ever met.
ROUNDING = {"bf16": 1e-4, "fp32": 1e-10}

MIN_LEARNING_RATE = 1e-6
_LARGE = 100_000_000  # parameters from which a model has the bounds of large ones
_MOST_LARGE, _MOST_TINY = 1e-4, 1e-2
_START = 5  # a first rate is so many times below the largest

_LOOKED_AT = 4096  # trained tokens of a round, about
_PER_TRAJECTORY = 0.3  # nats; what moved the tiny policies best is 0.2 to 0.45
_LEAST_TARGET, _MOST_TARGET = 1e-3, 1e-2  # nats a token: ten times bf16's rounding; as much as tiny policies bore
_BAND = 2.0
_MOST_UP = 4.0
_ABOVE_ROUNDING = 4.0  # an aim nearer to rounding than this cannot be steered by
_BROKEN = 0.25  # what follows a movement that is no number


@dataclass(frozen=True, slots=True)
class Bounds:
    """The smallest rate, the first one and the largest."""

    least: float
    start: float
    most: float


def bounds(parameters: int) -> Bounds:
    """Return the bounds for a base model of so many parameters.

    The largest rate is 1e-4 from 100 million parameters on and 1e-2 up to one million; between them it falls as 1 / n.
    The first one is a fifth of it: 2e-5 for large models, 2e-3 for tiny ones.
    """
    most = min(_MOST_TINY, max(_MOST_LARGE, _MOST_LARGE * _LARGE / max(parameters, 1)))
    return Bounds(MIN_LEARNING_RATE, most / _START, most)


def target(target_kl: float | None, tokens: int, trajectories: int) -> float:
    """Return the mean k3 that a round of so many trained tokens should move by, in nats a token.

    `target_kl` where it is set; else 0.3 nats a trajectory, as far as that lies within 0.001 and 0.01 a token.
    """
    if target_kl is not None:
        return target_kl
    a_token = _PER_TRAJECTORY * max(trajectories, 1) / max(tokens, 1)
    return min(_MOST_TARGET, max(_LEAST_TARGET, a_token))


def every(tokens: int) -> int:
    """Return that every so manieth part of a round of so many trained tokens is looked at, for about 4096 of them."""
    return max(1, round(tokens / _LOOKED_AT))


@dataclass(frozen=True, slots=True)
class RateState:
    """What the rate of the next round follows from."""

    rate: float
    first_entropy: float | None = None


@dataclass(frozen=True, slots=True)
class RoundShift:
    """What a round says to the rate: mean k3, mean entropy, the target a token, the factor that its rate had.

    `scale` is below 1 where a small round took a smaller step than the rate said: its movement is expected to be as
    many times squared below the target.
    """

    k3: float
    entropy: float
    target: float
    scale: float = 1.0


def aim(state: RateState, moved: RoundShift, rounding: float) -> float:
    """Return the k3 that a round at full rate should have: the target, less as the entropy falls below its first."""
    first = moved.entropy if state.first_entropy is None else state.first_entropy
    share = min(1.0, moved.entropy / first) if first > 0 else 1.0
    return max(moved.target * share, min(moved.target, _ABOVE_ROUNDING * rounding))


def steered(state: RateState, moved: RoundShift, limits: Bounds, rounding: float) -> RateState:
    """Return the state after a round."""
    first = moved.entropy if state.first_entropy is None else state.first_entropy
    expected = aim(state, moved, rounding) * moved.scale**2
    if moved.scale < 1 and expected < _BAND * rounding:  # too small a step to be seen says nothing about the rate
        return RateState(state.rate, first)
    rate = state.rate * _factor(moved.k3, expected)
    return RateState(min(limits.most, max(limits.least, rate)), first)


def _factor(k3: float, expected: float) -> float:
    if not math.isfinite(k3):
        return _BROKEN
    if expected / _BAND <= k3 <= expected * _BAND:
        return 1.0
    return min(_MOST_UP, math.sqrt(expected / k3)) if k3 > 0 else _MOST_UP


class LearningRateController:
    """The rate of one learner: fixed where its settings name a number or its loss imitates, else steered."""

    def __init__(self, settings: LearnerSettings, parameters: int, dtype: str) -> None:
        self.bounds = bounds(parameters)
        self.dtype = dtype  # that the model computes in: bf16 or fp32
        self.adopt(settings)

    def adopt(self, settings: LearnerSettings) -> None:
        """Begin anew with other settings."""
        self.steers = settings.learning_rate == AUTO and settings.loss_type != "sft"
        self._target_kl = settings.target_kl
        rate = settings.learning_rate
        self._state = RateState(self.bounds.start if isinstance(rate, str) else rate)

    @property
    def rate(self) -> float:
        """The rate of the next round, before any scale of its own."""
        return self._state.rate

    def target(self, tokens: int, trajectories: int) -> float:
        """Return the mean k3 a token that a round should move by."""
        return target(self._target_kl, tokens, trajectories)

    def aim(self, moved: RoundShift) -> float:
        """Return what a round is steered to."""
        return aim(self._state, moved, ROUNDING[self.dtype])

    def after(self, moved: RoundShift) -> None:
        """Learn from a round."""
        if self.steers:
            self._state = steered(self._state, moved, self.bounds, ROUNDING[self.dtype])

    def state(self) -> dict[str, Any] | None:
        """Return what a checkpoint keeps; None where nothing is steered."""
        return asdict(self._state) if self.steers else None

    def restore(self, kept: Mapping[str, Any] | None) -> None:
        """Go on from what a checkpoint kept; a fixed rate stays, and a checkpoint without any begins anew."""
        if self.steers:
            self._state = RateState(self.bounds.start) if kept is None else RateState(**kept)
