"""Rates by version: invalid tool calls, and questions in place of actions. Pure, on behaviors.

Both are what a policy learns to do if its judge can be fooled: a judge that likes polite answers rewards questions, and
one that reads only the last answer does not see wrong calls. A version's rate is the mean share over its trajectories,
so that a long trajectory counts once. The newest version is compared with all older ones in the window; an alarm needs
an increase by a threshold and by `min_sigmas` pooled standard errors, and `MIN_TRAJECTORIES` on either side. While it
lasts, newer versions are compared with the same older ones: a reward hack does not become its own history.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ratchet.trainer.controller.sentinel.behavior import TrajectoryBehavior
from ratchet.trainer.observability.finding import Finding
from ratchet.trainer.settings.sentinel_settings import SentinelSettings

INVALID_CALLS, QUESTIONS = "invalid_tool_calls", "questions"
CHECKS = frozenset({INVALID_CALLS, QUESTIONS})
MIN_TRAJECTORIES = 32
_MAX_VERSIONS = 8  # newest ones that are shown


@dataclass(frozen=True, slots=True)
class RateHistory:
    """What a rate is compared with: the trajectories of older versions, the sum of their shares, and of its squares."""

    trajectories: int
    total: float
    squares: float

    @property
    def mean(self) -> float:
        """The rate."""
        return self.total / self.trajectories


def check_versions(
    behaviors: Sequence[TrajectoryBehavior], settings: SentinelSettings, known: Mapping[str, RateHistory] | None = None
) -> tuple[list[Finding], dict[str, RateHistory]]:
    """Return a finding for each rate and version, and the histories of the rates that raise an alarm, by check.

    `known` are the histories that this returned at the last check.
    """
    findings: list[Finding] = []
    alarming: dict[str, RateHistory] = {}
    for check, metric, share, limit, advice in (
        (INVALID_CALLS, "ratchet_invalid_tool_call_ratio", _invalid, settings.max_invalid_call_increase, _CALLS),
        (QUESTIONS, "ratchet_question_ratio", _questions, settings.max_question_increase, _QUESTIONS),
    ):
        rates = _rates(behaviors, share)
        newest = max((version for version in rates if rates[version].trajectories >= MIN_TRAJECTORIES), default=None)
        for version in sorted(rates)[-_MAX_VERSIONS:]:
            reason = None
            if version == newest:
                before = (known or {}).get(check) or _sum([rates[older] for older in rates if older < version])
                if _has_risen(before, rates[version], limit, settings.min_sigmas):
                    alarming[check] = before
                    reason = f"version {version}: {advice.format(rates[version].mean, before.mean)}"
            findings.append(Finding(check, metric, str(version), rates[version].mean, reason))
    return findings, alarming


_CALLS = (
    "{:.0%} of its tool calls name no offered tool or violate its schema, {:.0%} in older versions; look at the calls "
    "(`ratchet trajectories`), let the judge see tool outcomes, or roll the version back"
)
_QUESTIONS = (
    "{:.0%} of its answers ask a question in place of an action, {:.0%} in older versions; check whether the judge "
    "rewards them, or roll the version back"
)


def _invalid(one: TrajectoryBehavior) -> float | None:
    return one.invalid_calls / one.checked_calls if one.checked_calls else None


def _questions(one: TrajectoryBehavior) -> float | None:
    return one.questions / one.answers if one.offered and one.answers else None


def _rates(
    behaviors: Sequence[TrajectoryBehavior], share: Callable[[TrajectoryBehavior], float | None]
) -> dict[int, RateHistory]:
    shares: dict[int, list[float]] = {}
    for one in behaviors:
        if (value := share(one)) is not None:
            shares.setdefault(one.version, []).append(value)
    return {
        version: RateHistory(len(values), math.fsum(values), math.fsum(value * value for value in values))
        for version, values in shares.items()
    }


def _sum(parts: Sequence[RateHistory]) -> RateHistory:
    return RateHistory(
        sum(one.trajectories for one in parts), sum(one.total for one in parts), sum(one.squares for one in parts)
    )


def _has_risen(before: RateHistory, now: RateHistory, limit: float, min_sigmas: float) -> bool:
    """Whether a rate has risen, by the pooled variance: few trajectories that are all equal prove nothing."""
    if before.trajectories < MIN_TRAJECTORIES or now.mean - before.mean < limit:
        return False
    both = _sum([before, now])
    variance = max(0.0, both.squares / both.trajectories - both.mean**2)
    error = math.sqrt(variance * (1 / before.trajectories + 1 / now.trajectories))
    return now.mean - before.mean >= min_sigmas * error
