"""The judge that asks nobody: what people said of a trajectory, as one score between 0 and 1.

Of each source (an end user, or a key without one) the newest word counts: its newest value for the whole trajectory,
else the mean of its newest values for each call. Sources that contradict each other are averaged, each with one vote,
and the verdict tells how far they lie apart. Comments are part of the explanation; demonstrations are no score.

Waiting for feedback is not done here: a trajectory comes to its judge when somebody spoke, or nobody did in time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence

from ratchet.store.records import Feedback, Transcript
from ratchet.trainer.controller.judges import Judgement
from ratchet.trainer.controller.judges.opinion import DraftVerdict, version_of
from ratchet.trainer.settings.judge_specs import DROP, FeedbackSpec

_NAME = "feedback"
_WORDS_MOST = 1000  # characters of comments in an explanation


class FeedbackJudge:
    """Reads the feedback that came with the transcript."""

    concurrency = 1

    def __init__(self, spec: FeedbackSpec, clock: Callable[[], float] = time.time) -> None:
        self._spec = spec
        self._clock = clock
        self.name = _NAME
        self.version = version_of(_NAME, spec.worst, spec.best, spec.missing)

    def close(self) -> None:
        """Nothing to let go of."""

    def judge(self, group_id: str | None, members: Sequence[Transcript]) -> Judgement:
        """Return one verdict per member, in order."""
        now = self._clock()
        return Judgement(
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
            words = " | ".join(said.comment for said in member.feedback if said.comment)
            components = {"sources": float(len(scores)), "apart": apart}
            return DraftVerdict.of(statistics.fmean(scores), words[:_WORDS_MOST], components)
        if self._spec.missing == DROP:
            return DraftVerdict.failed("nobody has given feedback on this trajectory yet")
        return DraftVerdict.of(float(self._spec.missing), "nobody gave feedback", {"sources": 0.0})

    def _score(self, value: float) -> float:
        worst, best = self._spec.worst, self._spec.best
        return min(1.0, max(0.0, (value - worst) / (best - worst)))


def votes_of(said: Iterable[Feedback]) -> dict[str, float]:
    """Return the value of each source that gave one; `said` is in the order in which it was said."""
    newest: dict[str, dict[str | None, float]] = {}
    for one in said:
        if one.value is not None:
            newest.setdefault(one.source, {})[one.call_id] = one.value
    return {
        source: values[None] if None in values else statistics.fmean(values.values())
        for source, values in newest.items()
    }
