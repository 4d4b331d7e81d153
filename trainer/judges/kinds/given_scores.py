"""Judges whose scores are given: human feedback, and the rewards of workflows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable

from ratchet.store.records import Feedback, Transcript
from ratchet.trainer.judges.judgement import (
    DraftVerdict,
    NamedJudge,
    version_of,
)
from ratchet.trainer.settings.judge_specs import DROP, FeedbackSpec, RewardSpec

# The feedback judge: the score of a trajectory is its human feedback, between 0 and 1.
#
# Each source (an end user, or a key without one) has one vote: its newest value for the whole trajectory, else the mean
# of its newest values per call. The score is the mean of the votes; the component `apart` is their range. Comments
# become the explanation; demonstrations have no score. The collector waits for feedback before it calls this judge.

_MAX_COMMENT_CHARS = 1000  # in an explanation


class FeedbackJudge(NamedJudge):
    """Scores the feedback in the transcript."""

    name = "feedback"

    def __init__(self, spec: FeedbackSpec, clock: Callable[[], float] = time.time) -> None:
        super().__init__(clock)
        self._spec = spec
        self.version = version_of(self.name, spec.worst, spec.best, spec.missing)

    def opinion(self, member: Transcript) -> DraftVerdict:
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


# The workflow judge: the score is the reward that the workflow of a rollout returned.
#
# A failed rollout gets the failure score. A trajectory without a rollout and a rollout without a reward are judge
# failures.

NO_REWARD = "the workflow returned no reward; return {response, reward}, or name another judge"


class RewardJudge(NamedJudge):
    """Scores with the workflow's reward."""

    name = "workflow"

    def __init__(self, spec: RewardSpec, clock: Callable[[], float] = time.time) -> None:
        super().__init__(clock)
        self._spec = spec
        self.version = version_of(spec.model_dump_json())

    def opinion(self, member: Transcript) -> DraftVerdict:
        returned = member.returned
        if returned is None:
            return DraftVerdict.failed("this trajectory is not a rollout of the tuner; only rollouts have a reward")
        if returned.failure is not None:
            return DraftVerdict.of(self._spec.failure_score, f"the rollout failed: {returned.failure}")
        if returned.reward is None:
            return DraftVerdict.failed(NO_REWARD)
        return DraftVerdict.of(returned.reward)
