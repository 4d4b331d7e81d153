"""Rollouts of the small world, written into the store without a proxy, as a workflow and a judge would."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ratchet.store.operation_records import Rollout
from ratchet.store.store import Store
from ratchet.trainer.tasks import Task, content_id
from ratchet.tuner.rollouts.runner import RolloutJob, plan_rollout
from tests.harness.records import end_rollout
from tests.harness.tuner import prompt_world

TOKENS = 30  # of a rollout
Answer = Callable[[str, str], str]


class Killed(BaseException):
    """The process ends here."""


def tasks(count: int, start: int = 0) -> list[Task]:
    """Tasks of the small world."""
    return [Task(content_id(row), row, "train", n, "world") for n, row in enumerate(prompt_world.rows(count, start))]


class WorldRollouts:
    """Makes rollouts and scores them. `fails` and `unjudged` name jobs; it is killed after `lives` rollouts."""

    def __init__(self, store: Store, tuning_id: str, answer: Answer = prompt_world.answer, lives: int = 10**9) -> None:
        self._store = store
        self._tuning_id = tuning_id
        self._answer = answer
        self._lives = lives
        self.made: list[tuple[str, str]] = []
        self.fails: Callable[[RolloutJob], bool] = lambda job: False
        self.unjudged: Callable[[str, str], bool] = lambda prompt, task: False
        self.tokens: Callable[[RolloutJob], int] = lambda job: TOKENS
        self.reward: Callable[[bool], float] = float
        self._prompts: dict[str, str] = {}

    def run(self, jobs: Sequence[RolloutJob]) -> list[Rollout]:
        """Make the rollouts of these jobs, one after the other."""
        return [self._one(job) for job in jobs]

    def judge(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Score rollouts."""
        return [self._score(one) for one in rollouts]

    def _one(self, job: RolloutJob) -> Rollout:
        rollout = plan_rollout(job, self._tuning_id)
        self._store.rollouts.plan([rollout])
        if len(self.made) >= self._lives:
            raise Killed
        prompt = job.system_prompt or prompt_world.SEED
        self._prompts[rollout.id] = prompt
        self.made.append((prompt, job.task.id))
        now = time.time()
        if self.fails(job):
            return end_rollout(
                self._store, rollout.id, failure="RuntimeError: scripted", ended_at=now, prompt_tokens=TOKENS
            )
        reply = self._answer(prompt, job.task.row["question"])
        right = reply == job.task.row["answer"]
        end_rollout(
            self._store,
            rollout.id,
            started_at=now,
            ended_at=now,
            reward=self.reward(right),
            prompt_tokens=self.tokens(job) - 5,
            completion_tokens=5,
        )
        return self._score(self._store.rollouts.get(rollout.id))

    def _score(self, rollout: Rollout) -> Rollout:
        if self.unjudged(self._prompts[rollout.id], rollout.task_id):
            return self._store.rollouts.score(rollout.id, None, "world", "the judge is out")
        return self._store.rollouts.score(rollout.id, rollout.reward, "world")
