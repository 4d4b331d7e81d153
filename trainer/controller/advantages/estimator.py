"""AdvantageEstimator: from the verdicts of a group, or of a single, to advantages. The only place that knows which is
which.

A group is compared with itself. A cohort, which is a group of different tasks, has each member compared with the mean
of the others. A single is compared with the running baseline of its task family; until the family has
`min_baseline_samples`
earlier scores there is none, and the single only adds its own. Where roles train apart, a group's verdicts may score
each of them: a component that has the role's name is that role's score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from ratchet.store.records import RESAMPLE, PastScore, Trajectory, Verdict
from ratchet.trainer.controller.advantages.advantage import (
    cohort_advantages,
    group_advantages,
    scale_over_round,
    single_advantage,
)
from ratchet.trainer.controller.advantages.baseline import ScoreHistory
from ratchet.trainer.controller.advantages.turn_advantages import Turns, turn_advantages
from ratchet.trainer.statistics.score_spread import NO_VARIANCE, has_signal


@dataclass(frozen=True, slots=True)
class AdvantageEstimator:
    """How the scores of one alias become advantages; `book` holds the scores so far and grows."""

    name: str = "grpo"
    by_family: bool = False
    min_baseline_samples: int = 16
    roles: tuple[str, ...] = ()  # that train, where they were chosen
    book: ScoreHistory = field(default_factory=ScoreHistory)
    turn_weight: float = 0.0

    def advantages(
        self, members: Sequence[Trajectory], verdicts: Sequence[Verdict], role: str | None = None
    ) -> tuple[float, ...] | None:
        """Return the advantages of a judged group, (G,) -> (G,); None for a single without a baseline.

        With `role` those that the calls of this role earned.
        """
        if is_cohort(members):
            return cohort_advantages(_scores(verdicts, role), self.name)
        if len(members) > 1:
            return group_advantages(_scores(verdicts, role), self.name)
        (verdict,) = self.with_baseline(members, verdicts)
        if verdict.baseline_mean is None:
            return None
        return (single_advantage(verdict.score or 0.0, verdict.baseline_mean, verdict.baseline_std or 0.0, self.name),)

    def with_baseline(self, members: Sequence[Trajectory], verdicts: Sequence[Verdict]) -> list[Verdict]:
        """Return the verdicts, that of a single with the baseline that its family has for it, if it has none yet.

        Later scores push earlier ones out of the book: a single that waits long for its round must keep what it had.
        """
        if len(members) != 1 or verdicts[0].baseline_mean is not None:
            return list(verdicts)
        found = self.book.baseline(past(members[0], verdicts[0]), self.min_baseline_samples)
        if found is None:
            return list(verdicts)
        return [msgspec.structs.replace(verdicts[0], baseline_mean=found.mean, baseline_std=found.std)]

    def turns(self, members: Sequence[Trajectory], verdicts: Sequence[Verdict]) -> list[Turns]:
        """Return what each member's single calls earned on top of that, by their number."""
        return turn_advantages(verdicts, self.name, 0.0 if is_cohort(members) else self.turn_weight)

    def teaches(self, members: Sequence[Trajectory], verdicts: Sequence[Verdict]) -> bool | None:
        """Whether the group holds a learning signal; None for a single without a baseline."""
        if len(members) > 1:
            whole = any(has_signal(_scores(verdicts, role)) for role in self.roles or (None,))
            return whole or any(any(turns.values()) for turns in self.turns(members, verdicts))
        advantages = self.advantages(members, verdicts)
        return None if advantages is None else abs(advantages[0]) > NO_VARIANCE

    def remember(self, members: Sequence[Trajectory], verdicts: Sequence[Verdict]) -> None:
        """Take the scores of a judged group into the book; those of resamples are no part of the traffic's past."""
        for member, verdict in zip(members, verdicts, strict=True):
            if member.purpose != RESAMPLE:
                self.book.add(past(member, verdict))

    def scale_over_round(self, families: Sequence[str], advantages: Sequence[float]) -> list[float]:
        """Return the advantages of a round's trajectories, scaled as the credit wants it."""
        return scale_over_round(list(zip(families, advantages, strict=True)), self.name, by_family=self.by_family)


def is_cohort(members: Sequence[Trajectory]) -> bool:
    """Whether the members of a group tried different things, so that nothing but their scores can be compared."""
    return len({member.group_key for member in members}) > 1


def _scores(verdicts: Sequence[Verdict], role: str | None) -> list[float]:
    """Return the scores of a role: the component of its name, where all have it, else what the whole scored."""
    if role is not None and all(role in verdict.components for verdict in verdicts):
        return [verdict.components[role] for verdict in verdicts]
    return [verdict.score or 0.0 for verdict in verdicts]


def past(member: Trajectory, verdict: Verdict) -> PastScore:
    """Return a verdict as later ones see it."""
    return PastScore(
        trajectory_id=member.id,
        family=member.family,
        cohort=member.group_key,
        version=member.version,
        score=verdict.score or 0.0,
        judged_at=verdict.judged_at,
    )
