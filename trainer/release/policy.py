"""The release policy: what to do next with the versions that serve. Pure.

    anchor      the last version that was shown to be better than the anchor before it; serves the holdback
    live        the newest version whose ramp has ended; serves the rest
    ramp        the release that serves beside the live one until enough trajectories are counted

A version is taken back when the evidence that the versions before it do better (`evidence.py`) reaches 1/alpha: in its
ramp to the live version, later to the anchor. In fifty equal releases, at most 5% of the series see a rollback with
alpha 0.001. The policy promises no more than that: which loss is found, and when, is `detectable_loss` in
`evaluation.py`.

One decision at a time: apply it and ask again, until the answer is to wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ratchet.trainer.settings.trainer_settings import ReleaseSettings

_MIN_RAMP = 256


class ReleaseAction(StrEnum):
    """What to do."""

    WAIT = "wait"
    ROLLBACK = "rollback"  # because of `version`: all versions newer than `target`, which serves in their place
    MOVE_ANCHOR = "move_anchor"  # to `version`, the live one
    END_RAMP = "end_ramp"  # `version` becomes live
    BEGIN_RAMP = "begin_ramp"  # `version`, the newest proven candidate, begins to serve
    CHANGE_SHARES = "change_shares"  # to `shares`


@dataclass(frozen=True, slots=True)
class ReleaseRules:
    """Lengths count counted trajectories; the evidence is that of `evidence.py`. `ramp` None: see `ramp_length`."""

    holdback: float = 0.1
    doubtful_holdback: float = 0.3
    ramp: int | None = None
    max_ramp: int = 3072
    alpha: float = 0.001  # of one release: how often an equal one is rolled back
    anchor_alpha: float = 0.05
    max_doubt_for_anchor: float = 2.0  # evidence against the live version

    @classmethod
    def of(cls, settings: ReleaseSettings) -> ReleaseRules:
        """Return the rules that the settings ask for."""
        usual = cls()
        return cls(
            holdback=settings.holdback, doubtful_holdback=max(settings.holdback, usual.doubtful_holdback),
            ramp=settings.ramp, alpha=settings.alpha,
            max_ramp=usual.max_ramp if settings.ramp is None else 12 * settings.ramp,
        )  # fmt: skip

    def ramp_length(self, round_size: int) -> int:
        """Return how long a ramp lasts for rounds of so many trajectories: 256, or half a round if that is more."""
        return max(_MIN_RAMP, round_size // 2) if self.ramp is None else self.ramp


@dataclass(frozen=True, slots=True)
class ReleaseState:
    """The versions that serve, and what is known about them.

    candidate     the newest version that is proven and may serve; None if there is none
    ramp_counted  trajectories counted since the ramp began
    harm          evidence of harm of each release since the anchor
    anchor_gain   evidence that everything since the anchor does better
    held          why a person must look first: the ramp does not end and the anchor does not move
    """

    anchor: int
    live: int
    ramp: int | None = None
    candidate: int | None = None
    ramp_counted: int = 0
    round_size: int = 0
    harm: Mapping[int, float] | None = None
    anchor_gain: float = 1.0
    shares: Mapping[int, float] | None = None
    held: str | None = None


@dataclass(frozen=True, slots=True)
class ReleaseDecision:
    """An action and its reason. `shares` are those of new trajectories once it is carried out."""

    action: ReleaseAction
    reason: str = ""
    version: int | None = None
    target: int | None = None
    shares: Mapping[int, float] | None = None


def decide(state: ReleaseState, rules: ReleaseRules) -> ReleaseDecision:
    """Return the next decision."""
    harm = state.harm or {}
    decision = _rollback(state, harm, rules) or _move_anchor(state, harm, rules)
    decision = decision or (_end_ramp(state, harm, rules) if state.ramp is not None else _begin_ramp(state))
    if decision is not None:
        return decision
    shares = shares_of(state.anchor, state.live, state.ramp, harm.get(state.live, 1.0), rules)
    if state.shares is not None and not _same(state.shares, shares):
        share = shares.get(state.anchor, 0.0)
        why = "in doubt" if _in_doubt(state, harm) else "not in doubt"
        reason = f"{state.live} is {why}: evidence of harm {harm.get(state.live, 1.0):.3g}; the holdback is {share:.0%}"
        return ReleaseDecision(ReleaseAction.CHANGE_SHARES, reason, state.live, shares=shares)
    return ReleaseDecision(ReleaseAction.WAIT, _describe(state, harm, rules))


def shares_of(anchor: int, live: int, ramp: int | None, harm: float, rules: ReleaseRules) -> dict[int, float]:
    """Return the share of new trajectories of each version that serves; `harm`: the evidence against the live one."""
    newest = live if ramp is None else ramp
    if newest == anchor:
        return {anchor: 1.0}
    holdback = rules.doubtful_holdback if live != anchor and harm > 1.0 else rules.holdback
    if ramp is None:
        return {anchor: holdback, live: 1.0 - holdback}
    half = (1.0 - holdback) / 2
    return {anchor: holdback + half, ramp: half} if live == anchor else {anchor: holdback, live: half, ramp: half}


def is_cause_unresolved(rolled_back: Sequence[bool]) -> bool:
    """Return whether two of the last ten releases (oldest first) were rolled back: their cause may be one that stays.

    A judge that is fooled, or a bad reward, makes training repeat the step; luck does not.
    """
    return sum(rolled_back[-10:]) >= 2


def _rollback(state: ReleaseState, harm: Mapping[int, float], rules: ReleaseRules) -> ReleaseDecision | None:
    worst = max(harm, key=lambda release: harm[release], default=None)
    if worst is None or harm[worst] < 1.0 / rules.alpha:
        return None
    what = f"evidence of harm {harm[worst]:.4g}, of {1.0 / rules.alpha:g} that are enough"
    if worst == state.ramp:
        reason = f"{state.live} does better than {worst} in its ramp: {what}"
        return ReleaseDecision(ReleaseAction.ROLLBACK, reason, worst, state.live)
    reason = f"the anchor {state.anchor} does better than everything since {worst}: {what}"
    return ReleaseDecision(ReleaseAction.ROLLBACK, reason, min(harm), state.anchor)


def _move_anchor(state: ReleaseState, harm: Mapping[int, float], rules: ReleaseRules) -> ReleaseDecision | None:
    shown = state.anchor_gain >= 1.0 / rules.anchor_alpha
    if state.live == state.anchor or state.held or not shown:
        return None
    if harm.get(state.live, 1.0) >= rules.max_doubt_for_anchor:
        return None
    reason = f"everything since {state.anchor} does better than it: evidence {state.anchor_gain:.4g}"
    return ReleaseDecision(ReleaseAction.MOVE_ANCHOR, reason, state.live)


def _end_ramp(state: ReleaseState, harm: Mapping[int, float], rules: ReleaseRules) -> ReleaseDecision | None:
    assert state.ramp is not None
    if state.held or state.ramp_counted < rules.ramp_length(state.round_size):
        return None
    evidence = harm.get(state.ramp, 1.0)
    if evidence > 1.0 and state.ramp_counted < rules.max_ramp:
        return None
    reason = f"no loss shown in {state.ramp_counted} trajectories: evidence of harm {evidence:.3g}"
    return ReleaseDecision(ReleaseAction.END_RAMP, reason, state.ramp)


def _begin_ramp(state: ReleaseState) -> ReleaseDecision | None:
    if state.held or state.candidate is None or state.candidate <= state.live:
        return None
    return ReleaseDecision(ReleaseAction.BEGIN_RAMP, "the newest proven version", state.candidate)


def _describe(state: ReleaseState, harm: Mapping[int, float], rules: ReleaseRules) -> str:
    if state.held:
        return state.held
    if state.ramp is None:
        return f"{state.live} is live; there is no newer version"
    length, evidence = rules.ramp_length(state.round_size), harm.get(state.ramp, 1.0)
    if state.ramp_counted < length:
        return f"{state.ramp_counted} of {length} trajectories of the ramp of {state.ramp} are counted"
    return f"{state.ramp} is in doubt: evidence of harm {evidence:.3g} after {state.ramp_counted} trajectories"


def _in_doubt(state: ReleaseState, harm: Mapping[int, float]) -> bool:
    return state.live != state.anchor and harm.get(state.live, 1.0) > 1.0


def _same(one: Mapping[int, float], other: Mapping[int, float]) -> bool:
    return one.keys() == other.keys() and all(abs(one[version] - other[version]) < 1e-6 for version in one)
