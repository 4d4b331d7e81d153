"""The protocol of judges: one verdict per trajectory. An error is a verdict with a `failure`, never a score.

The limits of `limits.py` hold for every verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ratchet.store.records import JudgeRequest, TeacherScore, Transcript, Verdict
from ratchet.trainer.controller.judges.limits import within_limits

__all__ = ["GroupJudgement", "Judge"]


@dataclass(frozen=True, slots=True)
class GroupJudgement:
    """The verdicts on a group, one per member in order, and the judge's requests to models.

    teacher_scores  of members that a teacher scored
    unavailable     why the judge could judge nothing now: its verdicts do not count, and the group is judged again
    """

    verdicts: tuple[Verdict, ...]
    judge_requests: tuple[JudgeRequest, ...] = ()
    teacher_scores: tuple[TeacherScore, ...] = ()
    unavailable: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "verdicts", tuple(map(within_limits, self.verdicts)))


class Judge(Protocol):
    """Scores the members of a group."""

    @property
    def name(self) -> str:
        """Return the name shown to people, such as `my_rules:judge`."""

    @property
    def version(self) -> str:
        """Return a hash of code and rubric; verdicts of different versions are not comparable."""

    @property
    def concurrency(self) -> int:
        """Return the number of groups that it can judge at the same time, each in its own thread."""

    def judge(self, group_id: str | None, members: Sequence[Transcript]) -> GroupJudgement:
        """Return one verdict per member, in order. Errors are verdicts with a failure; does not raise."""

    def close(self) -> None:
        """Close connections; the judge is not used afterwards."""
