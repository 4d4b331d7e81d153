"""Mixtures of task families that train one adapter: the tasks of each round, drawn by weight. Pure.

A family is a task set with a name and a weight. Each task of a round belongs to a family drawn by weight; within a
family, tasks come in shuffled order, each once before any repeats. The tasks of a round depend only on the seed and the
round number, so that an interrupted run resumes with the same tasks.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass

from ratchet.trainer.errors import TaskSetError
from ratchet.trainer.tasks import TRAIN, Task, TaskSet

VALIDATION = ("validation", "valid", "val", "dev")  # names of a validation split


@dataclass(frozen=True, slots=True)
class TaskFamily:
    """A task set with a name and a relative weight."""

    name: str
    tasks: TaskSet
    weight: float = 1.0

    def of(self, split: str, limit: int | None = None) -> list[Task]:
        """Return the tasks of a split with ids `name/id`. Raises TaskSetError."""
        return [dataclasses.replace(task, id=f"{self.name}/{task.id}") for task in self.tasks.rows(split, limit)]

    def validation(self, limit: int, seed: int, tests: Container[str]) -> list[Task]:
        """Return the validation tasks, without test tasks.

        They come from the validation split, or, without one, from the training tasks, at most a quarter of them. Raises
        TaskSetError.
        """
        own = next((split for split in self.tasks.splits() if split in VALIDATION), None)
        found = sorted({task.id: task for task in self.of(own or TRAIN) if task.id not in tests}.values(), key=_id)
        random.Random(f"{seed}/{self.name}/validation").shuffle(found)
        share = len(found) if own else max(1, len(found) // 4)
        if not found or (own is None and len(found) < 2):
            raise TaskSetError(
                f"task set {self.name} has no task left for validation: add training tasks that are not in its test "
                "split, or a split called validation"
            )
        return found[: min(limit, share)]


def _id(task: Task) -> str:
    return task.id


def parse_families(given: Sequence[str], opened: Callable[[str], TaskSet] = TaskSet.open) -> list[TaskFamily]:
    """Parse `SOURCE`, `NAME=SOURCE` or `NAME=SOURCE:WEIGHT`. Raises TaskSetError, and the errors of `opened`."""
    families = [_family(one, opened) for one in given]
    twice = [name for name, count in Counter(family.name for family in families).items() if count > 1]
    if twice:
        raise TaskSetError(f"--tasks: two task sets have the name {twice[0]}: give each a name, NAME=SOURCE:WEIGHT")
    return families


def _family(given: str, opened: Callable[[str], TaskSet]) -> TaskFamily:
    name, named, rest = given.partition("=")
    if not named:
        found = opened(given)
        return TaskFamily(found.name, found)
    source, weighed, weight = rest.rpartition(":")
    try:
        value = float(weight) if weighed else 1.0
    except ValueError:  # the colon belongs to the source
        source, value = rest, 1.0
    if not 0 < value < math.inf:
        raise TaskSetError(f"--tasks {given}: the weight is {weight}; it must be above 0")
    return TaskFamily(name, opened(source if weighed else rest), value)


class TaskMix:
    """The training tasks of all families, without the excluded ones."""

    def __init__(self, families: Iterable[TaskFamily], seed: int, excluded: Container[str] = frozenset()) -> None:
        self._families = list(families)
        self._tasks = {
            family.name: [task for task in family.of(TRAIN) if task.id not in excluded] for family in self._families
        }
        if bare := next((name for name, tasks in self._tasks.items() if not tasks), None):
            raise TaskSetError(f"task set {bare} has no training tasks: all of them are test or validation tasks")
        self._seed = seed

    def draw(self, number: int, count: int) -> list[Task]:
        """Return `count` tasks for the round with this number (from 0)."""
        before: Counter[str] = Counter()
        for earlier in range(number):
            before.update(self._counts(earlier, count))
        own = self._counts(number, count)
        return [task for name in own for task in self._slice(name, before[name], own[name])]

    def _counts(self, number: int, count: int) -> Counter[str]:
        """Return the number of tasks per family in a round."""
        dice = random.Random(f"{self._seed}/mix/{number}")
        names, weights = [f.name for f in self._families], [f.weight for f in self._families]
        return Counter(dice.choices(names, weights, k=count))

    def _slice(self, name: str, start: int, count: int) -> list[Task]:
        """Return `count` tasks of a family's endless sequence, reshuffled in every epoch."""
        tasks = self._tasks[name]
        order: list[Task] = []
        for epoch in range(start // len(tasks), (start + count) // len(tasks) + 1):
            shuffled = list(tasks)
            random.Random(f"{self._seed}/{name}/{epoch}").shuffle(shuffled)
            order += shuffled
        begin = start % len(tasks)
        return order[begin : begin + count]
