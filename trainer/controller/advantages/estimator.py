"""AdvantageEstimator: from the verdicts of a group to a JudgedGroup. Only this module knows the kinds of groups.

A group compares its members with each other. A cohort, a group of different tasks, compares each member with the mean
of the others. An ungrouped trajectory is compared with the running baseline of its task family; until the family has
`min_baseline_samples` earlier scores it has no advantage, and only adds its own score to the baseline. If roles are
trained separately, a verdict may score each role: the component that has the role's name is that role's score.

A component `turn:3` is the reward of a trajectory's third call. The turn rewards of a group are compared with each
other like scores, and `turn_weight` times their advantage is added for the tokens of that call. Groups in which only
some members have turn rewards, cohorts and ungrouped trajectories have nothing to compare and get none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from ratchet.store.records import RESAMPLE, Group, PastScore, Trajectory, Verdict
from ratchet.trainer.controller.advantages.advantage import (
    cohort_advantages,
    group_advantages,
    scale_over_round,
    single_advantage,
)
from ratchet.trainer.controller.advantages.baseline import ScoreHistory
from ratchet.trainer.controller.advantages.judged_group import JudgedGroup, MemberAdvantages, is_cohort
from ratchet.trainer.settings.estimators import DEFAULT_ESTIMATOR

_TURN = "turn:"


@dataclass(frozen=True, slots=True)
class AdvantageEstimator:
    """How the scores of one alias become advantages. `history` holds the scores so far and grows."""

    name: str = DEFAULT_ESTIMATOR
    by_family: bool = False
    min_baseline_samples: int = 16
    roles: tuple[str, ...] = ()  # the roles that train; empty if roles are not separated
    history: ScoreHistory = field(default_factory=ScoreHistory)
    turn_weight: float = 0.0
    distilled: bool = False  # nothing is compared: a teacher's logprobs are the signal
    noise: float = 0.0  # the standard deviation of the judge's scores of one and the same answer

    def estimate(self, group: Group, members: Sequence[Trajectory], verdicts: Sequence[Verdict]) -> JudgedGroup:
        """Return the group with its advantages; the verdict of an ungrouped trajectory records its baseline."""
        if self.distilled:
            return JudgedGroup(group, tuple(members), tuple(verdicts), (MemberAdvantages(0.0),) * len(members))
        verdicts = self._with_baseline(members, verdicts)
        whole = self.advantages(members, verdicts)
        if whole is None:
            return JudgedGroup(group, tuple(members), tuple(verdicts), None)
        by_role = {role: self.advantages(members, verdicts, role) or whole for role in self.roles}
        turns = turn_advantages(verdicts, self.name, 0.0 if is_cohort(members) else self.turn_weight, self.noise)
        advantages = tuple(
            MemberAdvantages(whole[place], {role: found[place] for role, found in by_role.items()}, turns[place])
            for place in range(len(members))
        )
        return JudgedGroup(group, tuple(members), tuple(verdicts), advantages)

    def advantages(
        self, members: Sequence[Trajectory], verdicts: Sequence[Verdict], role: str | None = None
    ) -> tuple[float, ...] | None:
        """Return the advantages of a group's members, or of one role's tokens, (G,) -> (G,).

        None for a single whose verdict has no baseline.
        """
        if is_cohort(members):
            return cohort_advantages(_scores(verdicts, role), self.name, self.noise)
        if len(members) > 1:
            return group_advantages(_scores(verdicts, role), self.name, self.noise)
        (verdict,) = verdicts
        if verdict.baseline_mean is None:
            return None
        mean, std = verdict.baseline_mean, verdict.baseline_std or 0.0
        return (single_advantage(verdict.score or 0.0, mean, std, self.name, self.noise),)

    def remember(self, members: Sequence[Trajectory], verdicts: Sequence[Verdict]) -> None:
        """Add scores to the history, except those of resamples: they are not traffic."""
        for member, verdict in zip(members, verdicts, strict=True):
            if member.purpose != RESAMPLE:
                self.history.add(past_score(member, verdict))

    def scale_over_round(self, judged: Sequence[JudgedGroup]) -> list[MemberAdvantages]:
        """Return the advantages of all members of a round's groups, in order, scaled over the round."""
        if self.distilled:
            return [MemberAdvantages(0.0) for group in judged for _ in group.members]
        families = [member.family for group in judged for member in group.members]
        found = [one for group in judged for one in group.advantages or [MemberAdvantages(0.0)] * len(group.members)]
        whole = self._scaled(families, [one.whole for one in found])
        by_role = {role: self._scaled(families, [one.by_role.get(role, 0.0) for one in found]) for role in self.roles}
        return [
            MemberAdvantages(whole[place], {role: scaled[place] for role, scaled in by_role.items()}, one.by_turn)
            for place, one in enumerate(found)
        ]

    def _scaled(self, families: Sequence[str], advantages: Sequence[float]) -> list[float]:
        pairs = list(zip(families, advantages, strict=True))
        return scale_over_round(pairs, self.name, by_family=self.by_family, noise=self.noise)

    def _with_baseline(self, members: Sequence[Trajectory], verdicts: Sequence[Verdict]) -> list[Verdict]:
        """Return the verdicts; that of a single with its family's baseline, unless it has one already.

        The baseline is stored because later scores push earlier ones out of the history while a single waits for its
        round.
        """
        if len(members) != 1 or verdicts[0].baseline_mean is not None:
            return list(verdicts)
        found = self.history.baseline(past_score(members[0], verdicts[0]), self.min_baseline_samples)
        if found is None:
            return list(verdicts)
        return [msgspec.structs.replace(verdicts[0], baseline_mean=found.mean, baseline_std=found.std)]


def turn_advantages(
    verdicts: Sequence[Verdict], estimator: str, weight: float, noise: float = 0.0
) -> list[Mapping[int, float]]:
    """Return the weighted advantages of each member's turns, by the number of the call."""
    rewards = [_turn_rewards(verdict) for verdict in verdicts]
    if not weight or len(rewards) < 2 or not all(rewards):
        return [{} for _ in rewards]
    advantages = iter(group_advantages([score for turns in rewards for score in turns.values()], estimator, noise))
    return [{number: weight * next(advantages) for number in turns} for turns in rewards]


def past_score(member: Trajectory, verdict: Verdict) -> PastScore:
    """Return a verdict as an entry of the score history."""
    return PastScore(
        trajectory_id=member.id,
        family=member.family,
        cohort=member.group_key,
        version=member.version,
        score=verdict.score or 0.0,
        judged_at=verdict.judged_at,
    )


def _turn_rewards(verdict: Verdict) -> dict[int, float]:
    named = {name.removeprefix(_TURN): score for name, score in verdict.components.items() if name.startswith(_TURN)}
    return {int(number): score for number, score in named.items() if number.isdecimal()}


def _scores(verdicts: Sequence[Verdict], role: str | None) -> list[float]:
    """Return the scores of a role: the component of its name if every verdict has it, else the overall scores."""
    if role is not None and all(role in verdict.components for verdict in verdicts):
        return [verdict.components[role] for verdict in verdicts]
    return [verdict.score or 0.0 for verdict in verdicts]
