"""The adaptive learning rate: the policy shift of a round sets the rate of the next one. Pure.

Useful rates differ by a factor of a thousand between models; the policy shift of a good round does not. The shift is
the k3 estimator of the KL from the new policy to the old one, less the floor that rounding alone reads as
(trainer/learner/training_round.py). It grows with the square of a small step, therefore

    rate of the next round = rate * sqrt(target / (k3 - floor))

outside a dead band of a factor of two on each side (k3 has a heavy tail), up by at most a factor of four per round,
down without limit, within `bounds`. A shift below half of the floor cannot be distinguished from rounding: shift
and target both count as at least half of the floor. So a number format too coarse for the target leaves the first rate
as it is, and still brings down one that is far too large.

The target falls with the policy's entropy: a low-entropy policy shifts less at the same rate, and a constant target
would drive the rate into its bound (measured on the e-mail example). PPO for robots commonly uses such rates (rsl_rl's
`desired_kl`).

A fixed rate may have a schedule, by the optimizer steps so far.

The state is saved in the checkpoint: a resumed learner continues with the same rate, and a learner that returns to an
earlier version returns to its rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ratchet.trainer.settings.learner_settings import AUTO

if TYPE_CHECKING:
    from ratchet.trainer.settings.learner_settings import LearnerSettings


MIN_LEARNING_RATE = 1e-6
_TINY = 1_000_000  # parameters up to which the bounds for tiny models apply
# LoRA's useful rates are about ten times those of full fine-tuning, whatever the size of the model (Schulman et al.
# 2025, "LoRA Without Regret"); 2e-4 and 3e-4 trained a model of 135 million parameters.
_MAX_LARGE, _MAX_TINY = 5e-4, 1e-2
_START = 5  # the largest rate over the first one

_SAMPLED_TOKENS = 4096  # per round, approximately
_PER_TRAJECTORY = 0.3  # nats; 0.2 to 0.45 trained the tiny policies best
_MIN_TARGET, _MAX_TARGET = 1e-3, 1e-2  # nats per token; the larger is the most that trained tiny policies stably
_BAND = 2.0
_MAX_INCREASE = 4.0
_SEEN = 0.5  # of the floor: the smallest shift that can be distinguished from it
_LEAST_SHARE = 0.1  # of the rate, at the end of a schedule
_NOT_FINITE = 0.25  # factor of the rate after a shift that is not finite


@dataclass(frozen=True, slots=True)
class Bounds:
    """The smallest rate, the first one and the largest."""

    least: float
    start: float
    most: float


def bounds(parameters: int) -> Bounds:
    """Return the bounds for a base model with this number of parameters.

    The largest rate is 1e-2 up to one million parameters and 5e-4 from 20 million on; between them it falls as 1 / n.
    The first rate is a fifth of it: 2e-3 for tiny models, 1e-4 for large ones.
    """
    most = min(_MAX_TINY, max(_MAX_LARGE, _MAX_TINY * _TINY / max(parameters, 1)))
    return Bounds(MIN_LEARNING_RATE, most / _START, most)


def target(target_kl: float | None, tokens: int, trajectories: int) -> float:
    """Return the target of the mean k3 of a round, in nats per token.

    `target_kl` if set; else 0.3 nats per trajectory, clamped to 0.001 to 0.01 per token.
    """
    if target_kl is not None:
        return target_kl
    per_token = _PER_TRAJECTORY * max(trajectories, 1) / max(tokens, 1)
    return min(_MAX_TARGET, max(_MIN_TARGET, per_token))


def sample_stride(tokens: int) -> int:
    """Return the stride through the rows of a round that samples about 4096 of its trained tokens."""
    return max(1, round(tokens / _SAMPLED_TOKENS))


@dataclass(frozen=True, slots=True)
class RateState:
    """The state that determines the rate of the next round."""

    rate: float
    first_entropy: float | None = None


@dataclass(frozen=True, slots=True)
class RoundShift:
    """The policy shift of a round: mean k3, its floor, mean entropy, target per token, scale of its rate.

    A small round has a `scale` below 1; its expected shift is the target times the square of the scale.
    """

    k3: float
    floor: float
    entropy: float
    target: float
    scale: float = 1.0


def target_shift(state: RateState, shift: RoundShift) -> float:
    """Return the k3 above the floor that is expected of a round at full rate: the target, reduced with the entropy."""
    first = shift.entropy if state.first_entropy is None else state.first_entropy
    return shift.target * min(1.0, shift.entropy / first) if first > 0 else shift.target


def next_state(state: RateState, shift: RoundShift, limits: Bounds) -> RateState:
    first = shift.entropy if state.first_entropy is None else state.first_entropy
    seen = _SEEN * shift.floor
    expected = max(target_shift(state, shift) * shift.scale**2, seen)
    rate = state.rate * _factor(max(shift.k3 - shift.floor, seen), expected)
    return RateState(min(limits.most, max(limits.least, rate)), first)


def _factor(k3: float, expected: float) -> float:
    if not math.isfinite(k3):
        return _NOT_FINITE
    if expected / _BAND <= k3 <= expected * _BAND:
        return 1.0
    return min(_MAX_INCREASE, math.sqrt(expected / k3)) if k3 > 0 else _MAX_INCREASE


def schedule(settings: LearnerSettings, step: int) -> float:
    """Return the factor of a fixed rate at an optimizer step, from 0 on.

    Like transformers' schedules of these names, but the first of the warm-up steps already changes the weights, and
    the rate ends at a tenth instead of 0, because training in production has no end.
    """
    if step < settings.warmup_steps:
        return (step + 1) / (settings.warmup_steps + 1)
    if settings.max_steps is None:
        return 1.0
    done = min(1.0, (step - settings.warmup_steps) / (settings.max_steps - settings.warmup_steps))
    left = 1 - done if settings.lr_scheduler_type == "linear" else (1 + math.cos(math.pi * done)) / 2
    return _LEAST_SHARE + (1 - _LEAST_SHARE) * left


class LearningRateController:
    """The rate of one learner: fixed if its settings give a number or its loss is SFT, else adaptive."""

    def __init__(self, settings: LearnerSettings, parameters: int, dtype: str) -> None:
        self.parameters = parameters  # of the base model
        self.bounds = bounds(parameters)
        self.dtype = dtype  # of the model's computation: bf16 or fp32
        self.apply_settings(settings)

    def apply_settings(self, settings: LearnerSettings) -> None:
        """Start over with other settings."""
        self.adapts = settings.learning_rate == AUTO and settings.loss_type != "sft"
        self._target_kl = settings.target_kl
        self._settings = settings
        rate = settings.learning_rate
        self._state = RateState(self.bounds.start if isinstance(rate, str) else rate)

    @property
    def rate(self) -> float:
        """The rate of the next round, before any scale of its own."""
        return self._state.rate

    def rate_at(self, step: int) -> float:
        return self._state.rate * schedule(self._settings, step)

    def target(self, tokens: int, trajectories: int) -> float:
        """Return the target of the mean k3 per token."""
        return target(self._target_kl, tokens, trajectories)

    def target_shift(self, shift: RoundShift) -> float:
        """Return the k3 expected of a round at full rate."""
        return target_shift(self._state, shift)

    def update(self, shift: RoundShift) -> None:
        if self.adapts:
            self._state = next_state(self._state, shift, self.bounds)

    def state(self) -> dict[str, Any] | None:
        """Return the state for a checkpoint; None if the rate is fixed."""
        return asdict(self._state) if self.adapts else None

    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """Restore the state of a checkpoint. A fixed rate stays; without a saved state the rate starts over."""
        if self.adapts:
            self._state = RateState(self.bounds.start) if saved is None else RateState(**saved)
