"""How far rounds moved the policy: too small, healthy or too large, and what to do.

The metrics of a round (docs/training.md, "The learning rate"): `approx_kl` is the mean k3 over the trained tokens of
its steps, in nats per token; `logprob_change_positive_mean` is the mean change of log p for positive advantages.
Rounds without these metrics are skipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ratchet.store.states import RoundState

if TYPE_CHECKING:
    from ratchet.store.store import Store

TOO_SMALL = 1e-4  # nats per token: no gain was seen below it, and bf16 rounding alone measures as this much
TOO_LARGE = 0.05  # nats per token: healthy rounds of tiny policies stayed below 0.03, collapsing ones had 0.1 to 0.4
COLLAPSING = -0.01  # nats per token: healthy rounds stayed above -0.005, collapsing ones fell below -0.02
RECENT_ROUNDS = 3  # rounds
_ROUNDS_READ = 20  # rounds, of which some may have been abandoned

Size = Literal["too small", "healthy", "too large"]

_MEANS: Mapping[Size, str] = {
    "too small": "too small to be seen",
    "healthy": "healthy",
    "too large": "too large: rounds like this end in collapse",
}


@dataclass(frozen=True, slots=True)
class Movement:
    """What one round moved; `dtype` is the model's computation (bf16 or fp32)."""

    version: int | None
    k3: float
    logprob_change_positive: float
    rate: float
    dtype: str
    scale: float = 1.0  # of the rate and so of the movement, below 1 in a small round

    @property
    def size(self) -> Size:
        """Too small, healthy or too large."""
        if self.k3 > TOO_LARGE:
            return "too large"
        return "too small" if self.k3 < TOO_SMALL * self.scale**2 else "healthy"

    @property
    def collapsing(self) -> bool:
        """Whether the round made its good answers less likely."""
        return self.logprob_change_positive < COLLAPSING

    def describe(self) -> str:
        """Return it in one clause."""
        means = _MEANS[self.size]
        if self.size == "too small" and self.dtype == "bf16":
            means += "; in bf16 rounding alone reads as this much"
        return f"{self.k3:.2g} nats a token (k3) at rate {self.rate:.2g}: {means}"


def movement_of(metrics: Mapping[str, Any], version: int | None = None) -> Movement | None:
    """Return the movement of a round; None if it was not measured."""
    if not metrics.get("approx_kl_tokens"):
        return None
    return Movement(
        version=version,
        k3=float(metrics["approx_kl"]),
        logprob_change_positive=float(metrics["logprob_change_positive_mean"]),
        rate=float(metrics["learning_rate"]),
        dtype=str(metrics["dtype"]),
        scale=float(metrics.get("rate_scale", 1.0)),
    )


def recent_movements(store: Store, alias: str) -> list[Movement]:
    """Return the movements of an alias's newest committed rounds, newest first."""
    rounds = store.rounds.page(alias, limit=_ROUNDS_READ)
    committed = [one for one in rounds if one.state is RoundState.COMMITTED]
    found = (movement_of(one.metrics, one.to_version) for one in committed)
    return [moved for moved in found if moved is not None][:RECENT_ROUNDS]


def describe_collapse(moved: Movement) -> str:
    """Return why a round warns of collapse, and the remedies."""
    return (
        f"its steps made its good answers less likely "
        f"({moved.logprob_change_positive:+.3f} nats a token at rate {moved.rate:.2g}), "
        "and rounds like this end in collapse: lower learner.learning_rate or, where it is auto, learner.target_kl; "
        "learner.beta (0.01) holds the policy near the base model; `ratchet policies rollback` goes back"
    )


def describe_stall(newest_first: Sequence[Movement]) -> str | None:
    """Return a warning with the remedy if all of the last rounds moved too little; else None."""
    last = newest_first[:RECENT_ROUNDS]
    if len(last) < RECENT_ROUNDS or any(moved.size != "too small" for moved in last):
        return None
    most = max(moved.k3 for moved in last)
    return (
        f"the steps are too small to be seen: the last {RECENT_ROUNDS} rounds moved the policy by at most "
        f"{most:.2g} nats a token, at rate {last[0].rate:.2g}; set learner.learning_rate: auto, or "
        f"ten times what it is; where "
        "it is auto, raise learner.target_kl"
    )
