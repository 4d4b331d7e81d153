"""The workflow judge: the score is the reward that the workflow of a rollout returned.

A failed rollout gets the failure score. A trajectory without a rollout and a rollout without a reward are judge
failures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ratchet.store.records import Transcript, Verdict
from ratchet.trainer.controller.judges import GroupJudgement
from ratchet.trainer.controller.judges.opinion import DraftVerdict, version_of
from ratchet.trainer.settings.judge_specs import RewardSpec

NO_REWARD = "the workflow returned no reward; return {response, reward}, or name another judge"


class RewardJudge:
    """Scores with the workflow's reward."""

    concurrency = 1
    name = "workflow"

    def __init__(self, spec: RewardSpec, clock: Callable[[], float] = time.time) -> None:
        self._spec = spec
        self._clock = clock
        self.version = version_of(spec.model_dump_json())

    def judge(self, group_id: str | None, members: Sequence[Transcript]) -> GroupJudgement:
        """Return one verdict per member, in order."""
        return GroupJudgement(tuple(self._verdict(group_id, member) for member in members))

    def close(self) -> None:
        """Do nothing."""

    def _verdict(self, group_id: str | None, member: Transcript) -> Verdict:
        return self._opinion(member).verdict(
            member, group_id, judge=self.name, version=self.version, judged_at=self._clock()
        )

    def _opinion(self, member: Transcript) -> DraftVerdict:
        returned = member.returned
        if returned is None:
            return DraftVerdict.failed("this trajectory is not a rollout of the tuner; only rollouts have a reward")
        if returned.failure is not None:
            return DraftVerdict.of(self._spec.failure_score, f"the rollout failed: {returned.failure}")
        if returned.reward is None:
            return DraftVerdict.failed(NO_REWARD)
        return DraftVerdict.of(returned.reward)
