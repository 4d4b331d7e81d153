"""The feedback judge: the score of a trajectory is its human feedback, between 0 and 1.

Each source (an end user, or a key without one) has one vote: its newest value for the whole trajectory, else the mean
of its newest values per call. The score is the mean of the votes; the component `apart` is their range. Comments become
the explanation; demonstrations have no score. The collector waits for feedback before it calls this judge.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence

from ratchet.store.records import Feedback, Transcript
from ratchet.trainer.controller.judges import GroupJudgement
from ratchet.trainer.controller.judges.opinion import DraftVerdict, version_of
from ratchet.trainer.settings.judge_specs import DROP, FeedbackSpec

_NAME = "feedback"
_MAX_COMMENT_CHARS = 1000  # in an explanation


class FeedbackJudge:
    """Scores the feedback in the transcript."""

    concurrency = 1

    def __init__(self, spec: FeedbackSpec, clock: Callable[[], float] = time.time) -> None:
        self._spec = spec
        self._clock = clock
        self.name = _NAME
        self.version = version_of(_NAME, spec.worst, spec.best, spec.missing)

    def close(self) -> None:
        """Do nothing."""

    def judge(self, group_id: str | None, members: Sequence[Transcript]) -> GroupJudgement:
        """Return one verdict per member, in order."""
        now = self._clock()
        return GroupJudgement(
            tuple(
                self._opinion(member).verdict(member, group_id, judge=self.name, version=self.version, judged_at=now)
                for member in members
            )
        )

    def _opinion(self, member: Transcript) -> DraftVerdict:
        votes = votes_of(member.feedback)
        if votes:
            scores = [self._score(vote) for vote in votes.values()]
            apart = max(scores) - min(scores)
            comments = " | ".join(entry.comment for entry in member.feedback if entry.comment)
            components = {"sources": float(len(scores)), "apart": apart}
            return DraftVerdict.of(statistics.fmean(scores), comments[:_MAX_COMMENT_CHARS], components)
        if self._spec.missing == DROP:
            return DraftVerdict.failed("this trajectory has no feedback yet")
        return DraftVerdict.of(float(self._spec.missing), "no feedback", {"sources": 0.0})

    def _score(self, value: float) -> float:
        worst, best = self._spec.worst, self._spec.best
        return min(1.0, max(0.0, (value - worst) / (best - worst)))


def votes_of(feedback: Iterable[Feedback]) -> dict[str, float]:
    """Return the vote of each source with a value; `feedback` is ordered by time."""
    newest: dict[str, dict[str | None, float]] = {}
    for entry in feedback:
        if entry.value is not None:
            newest.setdefault(entry.source, {})[entry.call_id] = entry.value
    return {
        source: values[None] if None in values else statistics.fmean(values.values())
        for source, values in newest.items()
    }
