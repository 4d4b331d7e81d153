"""Replaces rollouts in tests of optimizers: scores come from the small world, and every evaluation is counted."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from ratchet.trainer.errors import BudgetExceeded, Unjudged
from ratchet.tuner.prompts.optimizer import Example, Search
from tests.harness.tuner import prompt_world

TASKS = {f"task{n:02d}": row for n, row in enumerate(prompt_world.rows(18))}
TRAIN, VALIDATION = tuple(TASKS)[:9], tuple(TASKS)[9:]


def search(seed: int = 0, rollouts: int = 300) -> Search:
    """Return the limits of a search over the small world."""
    return Search(TRAIN, VALIDATION, seed, rollouts)


class WorldEvaluate:
    """Scores prompts in the small world. `unjudged` names pairs that the judge fails on."""

    def __init__(self, most: int = 300, unjudged: Callable[[str, str], bool] = lambda prompt, task: False) -> None:
        self.known: dict[tuple[str, str], float | None] = {}
        self.questions: list[tuple[str, tuple[str, ...]]] = []
        self._most = most
        self._unjudged = unjudged

    @property
    def paid(self) -> int:
        return len(self.known)

    def scores_or_none(self, prompt: str, task_ids: Sequence[str]) -> list[float | None]:
        self.questions.append((prompt, tuple(task_ids)))
        new = [task for task in task_ids if (prompt, task) not in self.known]
        if self.paid + len(new) > self._most:
            raise BudgetExceeded("the test's budget")
        for task in new:
            row = TASKS[task]
            right = prompt_world.answer(prompt, row["question"]) == row["answer"]
            self.known[prompt, task] = None if self._unjudged(prompt, task) else float(right)
        return [self.known[prompt, task] for task in task_ids]

    def scores(self, prompt: str, task_ids: Sequence[str]) -> list[float]:
        scores = self.scores_or_none(prompt, task_ids)
        if None in scores:
            raise Unjudged("the test's judge")
        return [score for score in scores if score is not None]

    def example(self, prompt: str, task_id: str) -> Example:
        reply = prompt_world.answer(prompt, TASKS[task_id]["question"])
        return Example(self.text(task_id), f"[assistant] {reply}", self.known[prompt, task_id] or 0.0)

    def text(self, task_id: str) -> str:
        return json.dumps(TASKS[task_id])

    def best(self) -> tuple[float, str]:
        """Return the highest mean on all validation tasks, and its prompt."""
        means = []
        for prompt in {prompt for prompt, _ in self.known}:
            scores = [self.known.get((prompt, task)) for task in VALIDATION]
            known = [score for score in scores if score is not None]
            if len(known) == len(VALIDATION):
                means.append((sum(known) / len(known), prompt))
        return max(means, default=(0.0, ""))
