"""JudgedGroup: a group with its verdicts and advantages, as the judge runner hands it to the training round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ratchet.store.records import Group, Trajectory, Verdict
from ratchet.trainer.statistics.score_spread import MIN_SCORE_SPREAD


@dataclass(frozen=True, slots=True)
class MemberAdvantages:
    """The advantages of one trajectory.

    whole    of its tokens, unless their role or turn has its own
    by_role  of the tokens that a role sampled; empty if roles are not trained separately
    by_turn  added for the tokens of single calls, by the number of the call in the trajectory, from 1
    """

    whole: float
    by_role: Mapping[str, float] = field(default_factory=dict)
    by_turn: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JudgedGroup:
    """The judged members of a group. `members`, `verdicts` and `advantages` have the same order.

    `advantages` is None for a single whose task family has no baseline yet.
    """

    group: Group
    members: tuple[Trajectory, ...]
    verdicts: tuple[Verdict, ...]
    advantages: tuple[MemberAdvantages, ...] | None

    @property
    def has_signal(self) -> bool | None:
        """Whether an advantage differs from zero; None for a single without a baseline."""
        if self.advantages is None:
            return None
        if len(self.members) == 1:
            return abs(self.advantages[0].whole) > MIN_SCORE_SPREAD
        return any(
            any(member.by_role.values() if member.by_role else (member.whole,)) or any(member.by_turn.values())
            for member in self.advantages
        )


def is_cohort(members: Sequence[Trajectory]) -> bool:
    """Whether the members of a group attempted different tasks; then only their scores can be compared."""
    return len({member.group_key for member in members}) > 1
