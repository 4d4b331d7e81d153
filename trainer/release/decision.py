"""Decide whether a canary is promoted, rolled back, or waits for a person. Pure.

    rollback  it is proven to be worse than the live version; or it has `max_samples` scores or its deadline is over,
              and it is not shown to be as good
    promote   it is proven to be at most `margin` worse, or better; or it has `max_samples` scores without proof either
              way, and its mean is at most `margin` below the live version's
    hold      it would be promoted, but its gain exceeds `max_gain`: a person looks first, because reward hacking looks
              like this
    wait      there are too few scores

The scores are those of real traffic of both versions since the canary began. The test may be repeated after every score
(`ratchet.trainer.statistics.sequential_test`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from ratchet.trainer.settings.release_settings import ReleaseRules
from ratchet.trainer.statistics.sequential_test import Difference, difference


class ReleaseAction(StrEnum):
    """What to do with the canary."""

    WAIT = "wait"
    PROMOTE = "promote"
    ROLLBACK = "rollback"
    HOLD = "hold"


@dataclass(frozen=True, slots=True)
class ReleaseDecision:
    """An action, its reason, and the difference of the mean scores behind it."""

    action: ReleaseAction
    reason: str
    difference: Difference | None = None

    def evidence(self) -> dict[str, Any]:
        """Return the decision in the form of a policy's evidence."""
        numbers = asdict(self.difference) if self.difference else None
        return {"release": {"action": str(self.action), "reason": self.reason, "difference": numbers}}


def decide(
    canary: Sequence[float], live: Sequence[float], rules: ReleaseRules, overdue: bool = False
) -> ReleaseDecision:
    """Return what to do with a canary, given the scores of both versions; `overdue`: its deadline is over."""
    if len(canary) < rules.min_samples or len(live) < rules.min_samples:
        few = f"{len(canary)} canary and {len(live)} live scores; each side needs {rules.min_samples}"
        if overdue:
            return ReleaseDecision(ReleaseAction.ROLLBACK, f"its deadline is over: {few}")
        return ReleaseDecision(ReleaseAction.WAIT, few)
    gain = difference(canary, live, rules.alpha)
    described = (
        f"difference {gain.value:+.3f} ({gain.low:+.3f} to {gain.high:+.3f}, at all times {1 - rules.alpha:.0%})"
    )
    if gain.high < 0:
        return ReleaseDecision(ReleaseAction.ROLLBACK, f"it is worse: {described}", gain)
    proven = gain.low > -rules.margin
    last_look = overdue or len(canary) >= rules.max_samples
    if not proven and not last_look:
        return ReleaseDecision(ReleaseAction.WAIT, described, gain)
    if not proven and gain.value < -rules.margin:
        reason = f"after {len(canary)} scores it is not shown to be as good: {described}"
        return ReleaseDecision(ReleaseAction.ROLLBACK, reason, gain)
    if rules.max_gain is not None and gain.value > rules.max_gain:
        reason = f"the gain exceeds max_gain {rules.max_gain:g}: {described}"
        return ReleaseDecision(ReleaseAction.HOLD, reason, gain)
    reason = described if proven else f"no loss shown in {len(canary)} scores: {described}"
    return ReleaseDecision(ReleaseAction.PROMOTE, reason, gain)
