"""The gate: whether a candidate that serves a share of new trajectories becomes live, is rolled back, or waits. Pure.

    rollback  it is proven to be worse than the live version, by more than nothing; or `most` scores passed, or its time
              is over, and it is not shown to be as good
    promote   it is proven to be worse by less than `margin` at most, or better; or `most` scores passed without proof
              either way and its mean is not below the live version's by more than the margin
    hold      it would be promoted, but the jump is larger than `max_gain`: a person looks first (reward hacking looks
              like this)
    wait      there is too little to tell

The scores are those of real traffic under both versions since the canary began; the test may be looked at after every
score (`sequential.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from ratchet.trainer.settings.release_settings import ReleaseRules
from ratchet.trainer.statistics.sequential_test import Difference, difference


class Action(StrEnum):
    """What to do with the canary."""

    WAIT = "wait"
    PROMOTE = "promote"
    ROLLBACK = "rollback"
    HOLD = "hold"


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do, why, and the numbers behind it."""

    action: Action
    reason: str
    found: Difference | None = None

    def evidence(self) -> dict[str, Any]:
        """Return the decision as the policy's row keeps it."""
        numbers = asdict(self.found) if self.found else None
        return {"release": {"action": str(self.action), "reason": self.reason, "difference": numbers}}


def decide(canary: Sequence[float], live: Sequence[float], rules: ReleaseRules, late: bool = False) -> Decision:
    """Return what to do with a canary, given the scores of both versions' traffic; `late`: its time is over."""
    if len(canary) < rules.least or len(live) < rules.least:
        few = f"{len(canary)} canary and {len(live)} live scores; each side needs {rules.least}"
        return Decision(Action.ROLLBACK, f"its time is over: {few}") if late else Decision(Action.WAIT, few)
    found = difference(canary, live, rules.alpha)
    told = f"difference {found.value:+.3f} ({found.low:+.3f} to {found.high:+.3f}, at all times {1 - rules.alpha:.0%})"
    if found.high < 0:
        return Decision(Action.ROLLBACK, f"it is worse: {told}", found)
    sound = found.low > -rules.margin
    over = late or len(canary) >= rules.most
    spent = over and found.value >= -rules.margin
    if over and not sound and not spent:
        return Decision(Action.ROLLBACK, f"after {len(canary)} scores it is not shown to be as good: {told}", found)
    if not sound and not spent:
        return Decision(Action.WAIT, told, found)
    if rules.max_gain is not None and found.value > rules.max_gain:
        return Decision(
            Action.HOLD, f"too good to be promoted unseen (gain over max_gain {rules.max_gain:g}): {told}", found
        )
    return Decision(Action.PROMOTE, told if sound else f"no harm in {len(canary)} scores: {told}", found)
