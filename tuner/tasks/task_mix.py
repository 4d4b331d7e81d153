"""Several task families that train one adapter: which tasks each round draws, by weight. Pure.

A family is a task set with a name and a weight. Each task of a round is of a family drawn by weight; inside a family
tasks come in shuffled order, every one once before any comes again. Promises: what a round draws follows from the seed
and its number alone, so that a run that was killed goes on with the same tasks.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass

from ratchet.trainer.errors import TaskSetError, TaskSetTooSmall
from ratchet.trainer.tasks.task_set import TRAIN, Task, TaskSet

VALIDATION = ("validation", "valid", "val", "dev")  # splits that are one


@dataclass(frozen=True, slots=True)
class Family:
    """A task set, what its tasks are called by, and how often they are drawn against those of others."""

    name: str
    tasks: TaskSet
    weight: float = 1.0

    def of(self, split: str, limit: int | None = None) -> list[Task]:
        """Return the tasks of a split, each under its family's name: `name/id`. Raises SplitNotFound, TaskSetEmpty."""
        return [dataclasses.replace(task, id=f"{self.name}/{task.id}") for task in self.tasks.rows(split, limit)]

    def validation(self, most: int, seed: int, tests: Container[str]) -> list[Task]:
        """Return the tasks that decide when to stop and which version is best, none of them a test task.

        Of a split for it where there is one; else drawn from the training tasks, at most a quarter of them. Raises
        TaskSetTooSmall.
        """
        own = next((split for split in self.tasks.splits() if split in VALIDATION), None)
        found = sorted({task.id: task for task in self.of(own or TRAIN) if task.id not in tests}.values(), key=_id)
        random.Random(f"{seed}/{self.name}/validation").shuffle(found)
        share = len(found) if own else max(1, len(found) // 4)
        if not found or (own is None and len(found) < 2):
            raise TaskSetTooSmall(
                f"task set {self.name} leaves no task for validation: add training tasks that are not in its test "
                "split, or a split called validation"
            )
        return found[: min(most, share)]


def _id(task: Task) -> str:
    return task.id


def parse_families(given: Sequence[str], opened: Callable[[str], TaskSet] = TaskSet.open) -> list[Family]:
    """Read `SOURCE`, `NAME=SOURCE` or `NAME=SOURCE:WEIGHT`. Raises TaskSetError, and what `opened` raises."""
    families = [_family(one, opened) for one in given]
    twice = [name for name, count in Counter(family.name for family in families).items() if count > 1]
    if twice:
        raise TaskSetError(f"--tasks: two task sets are called {twice[0]}: give each a name, NAME=SOURCE:WEIGHT")
    return families


def _family(given: str, opened: Callable[[str], TaskSet]) -> Family:
    name, named, told = given.partition("=")
    if not named:
        found = opened(given)
        return Family(found.name, found)
    source, weighed, weight = told.rpartition(":")
    try:
        value = float(weight) if weighed else 1.0
    except ValueError:  # a colon of the source's own
        source, value = told, 1.0
    if not 0 < value < math.inf:
        raise TaskSetError(f"--tasks {given}: the weight is {weight}; it must be above 0")
    return Family(name, opened(source if weighed else told), value)


class TaskMix:
    """The training tasks of all families, but for those that are set aside."""

    def __init__(self, families: Iterable[Family], seed: int, aside: Container[str] = frozenset()) -> None:
        self._families = list(families)
        self._tasks = {
            family.name: [task for task in family.of(TRAIN) if task.id not in aside] for family in self._families
        }
        if bare := next((name for name, tasks in self._tasks.items() if not tasks), None):
            raise TaskSetTooSmall(
                f"task set {bare} leaves nothing to train on: its training tasks are all in its tests"
            )
        self._seed = seed

    def draw(self, number: int, count: int) -> list[Task]:
        """Return the `count` tasks of the round with this number, from 0."""
        before: Counter[str] = Counter()
        for earlier in range(number):
            before.update(self._counts(earlier, count))
        own = self._counts(number, count)
        return [task for name in own for task in self._slice(name, before[name], own[name])]

    def _counts(self, number: int, count: int) -> Counter[str]:
        """Return how many tasks of each family the round draws."""
        dice = random.Random(f"{self._seed}/mix/{number}")
        names, weights = [f.name for f in self._families], [f.weight for f in self._families]
        return Counter(dice.choices(names, weights, k=count))

    def _slice(self, name: str, start: int, count: int) -> list[Task]:
        """Return `count` tasks of a family's endless order, which is shuffled anew each time through."""
        tasks = self._tasks[name]
        order: list[Task] = []
        for epoch in range(start // len(tasks), (start + count) // len(tasks) + 1):
            shuffled = list(tasks)
            random.Random(f"{self._seed}/{name}/{epoch}").shuffle(shuffled)
            order += shuffled
        begin = start % len(tasks)
        return order[begin : begin + count]
