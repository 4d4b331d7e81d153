"""The by_family judge: each task family has a judge of its own, `other` scores the rest.

The family is the part of the task's id before its last slash: `mail` of `mail/3f2a...`. A trajectory without a judge is
a judge failure. Scores of different families are not comparable, and nothing compares them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from ratchet.store.records import Transcript, Verdict
from ratchet.trainer.controller.judges import GroupJudgement, Judge
from ratchet.trainer.controller.judges.both_orders import compares
from ratchet.trainer.controller.judges.opinion import DraftVerdict, version_of


class ByFamilyJudge:
    """The families' judges; each judges the members of a group that belong to it together."""

    def __init__(
        self, judges: Mapping[str, Judge], other: Judge | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._judges = dict(judges)
        self._other = other
        self._clock = clock
        self._all = [*judges.values(), *([] if other is None else [other])]
        self.name = "by_family:" + "+".join(self._judges)
        parts = [(name, one.name, one.version) for name, one in judges.items()]
        self.version = version_of(*parts, *([] if other is None else [("", other.name, other.version)]))

    @property
    def concurrency(self) -> int:
        """Return the smallest concurrency of the judges."""
        return min(judge.concurrency for judge in self._all)

    @property
    def compares(self) -> bool:
        """Return whether any judge sees the members together."""
        return any(map(compares, self._all))

    def judge(self, group_id: str | None, members: Sequence[Transcript]) -> GroupJudgement:
        """Return one verdict per member, in order."""
        verdicts: dict[str, Verdict] = {}
        judgements: list[GroupJudgement] = []
        for family, group in _by_family(members).items():
            judge = self._judges.get(family, self._other)
            if judge is None:
                verdicts |= {one.trajectory.id: self._unjudged(group_id, one, family) for one in group}
                continue
            judgements.append(judge.judge(group_id, group))
            verdicts |= {one.trajectory_id: self._own(one) for one in judgements[-1].verdicts}
        return GroupJudgement(
            tuple(verdicts[member.trajectory.id] for member in members),
            tuple(request for one in judgements for request in one.judge_requests),
            tuple(score for one in judgements for score in one.teacher_scores),
            next((one.unavailable for one in judgements if one.unavailable is not None), None),
        )

    def close(self) -> None:
        """Close every judge."""
        for judge in self._all:
            judge.close()

    def _own(self, verdict: Verdict) -> Verdict:
        return msgspec.structs.replace(verdict, judge=self.name, judge_version=self.version)

    def _unjudged(self, group_id: str | None, member: Transcript, family: str) -> Verdict:
        where = f"the task family {family!r}" if member.trajectory.task else "trajectories without a task"
        reason = f"no judge of {where}: it has {', '.join(self._judges)}; add one, or set `other`"
        return DraftVerdict.failed(reason).verdict(
            member, group_id, judge=self.name, version=self.version, latency=0.0, judged_at=self._clock()
        )


def _by_family(members: Sequence[Transcript]) -> dict[str, list[Transcript]]:
    found: dict[str, list[Transcript]] = {}
    for member in members:
        found.setdefault((member.trajectory.task or "").rpartition("/")[0], []).append(member)
    return found
