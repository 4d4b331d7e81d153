"""How far rounds moved the policy: lost in rounding, too small, healthy or too large, and what to do.

The metrics of a round (docs/training.md, "The learning rate"): `approx_kl` is the mean k3 over the trained tokens of
its steps, in nats per token; `approx_kl_floor` is what rounding alone reads as, in this round with this model;
`logprob_change_positive_mean` is the mean change of log p for positive advantages. Rounds without these metrics are
skipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ratchet.store.states import RoundState

if TYPE_CHECKING:
    from ratchet.store.store import Store

SEEN = 0.5  # of the floor: the smallest movement that can be distinguished from it
TOO_SMALL = 1e-4  # nats per token: no gain was seen below it
TOO_LARGE = 0.05  # nats per token: healthy rounds of tiny policies stayed below 0.03, collapsing ones had 0.1 to 0.4
COLLAPSING = -0.01  # nats per token: healthy rounds stayed above -0.005, collapsing ones fell below -0.02
RECENT_ROUNDS = 3  # rounds
_WORTH_NAMING = 0.1  # of k3
_ROUNDS_READ = 20  # rounds, of which some may have been abandoned

Size = Literal["lost in rounding", "too small", "healthy", "too large"]

_MEANS: Mapping[Size, str] = {
    "lost in rounding": "not distinguishable from rounding",
    "too small": "too small to be seen",
    "healthy": "healthy",
    "too large": "too large: rounds like this end in collapse",
}


@dataclass(frozen=True, slots=True)
class Movement:
    """What one round moved, with the floor of `k3`."""

    version: int | None
    k3: float
    logprob_change_positive: float
    rate: float
    floor: float = 0.0
    scale: float = 1.0  # of the rate and so of the movement, below 1 in a small round

    @property
    def above_floor(self) -> float:
        """Nats per token that the steps moved the policy."""
        return max(0.0, self.k3 - self.floor)

    @property
    def size(self) -> Size:
        """Lost in rounding, too small, healthy or too large."""
        if self.above_floor > TOO_LARGE:
            return "too large"
        if self.above_floor < SEEN * self.floor:
            return "lost in rounding"
        return "too small" if self.above_floor < TOO_SMALL * self.scale**2 else "healthy"

    @property
    def collapsing(self) -> bool:
        """Whether the round made its good answers less likely."""
        return self.logprob_change_positive < COLLAPSING

    def describe(self) -> str:
        """Return it in one clause."""
        rounding = f", of which {self.floor:.2g} is rounding" if self.floor > _WORTH_NAMING * self.k3 else ""
        return f"{self.k3:.2g} nats a token (k3) at rate {self.rate:.2g}{rounding}: {_MEANS[self.size]}"


def movement_of(metrics: Mapping[str, Any], version: int | None = None) -> Movement | None:
    """Return the movement of a round; None if it was not measured."""
    if not metrics.get("approx_kl_tokens"):
        return None
    return Movement(
        version=version,
        k3=float(metrics["approx_kl"]),
        logprob_change_positive=float(metrics["logprob_change_positive_mean"]),
        rate=float(metrics["learning_rate"]),
        floor=float(metrics.get("approx_kl_floor", 0.0)),
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
    if len(last) < RECENT_ROUNDS or any(moved.size not in ("too small", "lost in rounding") for moved in last):
        return None
    most = max(moved.above_floor for moved in last)
    if any(moved.size == "lost in rounding" for moved in last):
        found = (
            f"moved the policy by less than its rounding shows ({max(moved.floor for moved in last):.2g} nats a token)"
        )
        more = ", or set learner.dtype and vllm.dtype to float32, which resolves smaller steps"
    else:
        found, more = f"moved the policy by at most {most:.2g} nats a token", ""
    return (
        f"the steps are too small to be seen: the last {RECENT_ROUNDS} rounds {found}, at rate {last[0].rate:.2g}; set "
        f"learner.learning_rate: auto, or ten times what it is; where it is auto, raise learner.target_kl{more}"
    )
