"""Training, validation and held-out tasks of a prompt tuning, disjoint by content. Pure.

The search sees training and validation tasks; held-out tasks decide whether its result is better. A task in both splits
of a set is held out.
"""

from __future__ import annotations

import random
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from ratchet.trainer.errors import TaskSetError
from ratchet.tuner.settings import MIN_HELD_OUT_TASKS, MIN_TRAIN_TASKS, MIN_VALIDATION_TASKS

_MAX_HELD_OUT_TASKS: Final = 100  # taken from the training split if there is no test split and no number is set


class HasId(Protocol):
    """A task."""

    @property
    def id(self) -> str:
        """A hash of its content."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Maximum number of tasks of each kind; held_out None: the whole test split."""

    train: int = 40
    validation: int = 40
    held_out: int | None = None


@dataclass(frozen=True, slots=True)
class Sets:
    """Task ids in the order of use."""

    train: tuple[str, ...]
    validation: tuple[str, ...]
    held_out: tuple[str, ...]


def divide(
    tasks: Iterable[HasId], test: Iterable[HasId], sizes: Sizes, seed: int, validation: Iterable[HasId] = ()
) -> Sets:
    """Return the three sets from a training, a test and a validation split. Raises TaskSetError.

    An empty split is replaced by a part of `tasks`. The same content and seed give the same sets.
    """
    held_out = list(dict.fromkeys(task.id for task in test))  # in the same order as other methods
    checked = _shuffled(validation, seed, held_out)
    rest = _shuffled(tasks, seed, {*held_out, *checked})
    if not held_out:
        share = max(MIN_HELD_OUT_TASKS, min(sizes.held_out or _MAX_HELD_OUT_TASKS, len(rest) // 2))
        held_out, rest = rest[:share], rest[share:]
    if not checked:
        share = max(MIN_TRAIN_TASKS, min(sizes.train, len(rest) // 2))
        rest, checked = rest[:share], rest[share:]
    sets = Sets(*(tuple(ids) for ids in (rest[: sizes.train], checked[: sizes.validation], held_out[: sizes.held_out])))
    _check(sets)
    return sets


def _shuffled(tasks: Iterable[HasId], seed: int, without: Container[str] = ()) -> list[str]:
    ids = sorted({task.id for task in tasks if task.id not in without})
    random.Random(f"prompt {seed}").shuffle(ids)
    return ids


def _check(sets: Sets) -> None:
    wanted = (
        (sets.train, MIN_TRAIN_TASKS),
        (sets.validation, MIN_VALIDATION_TASKS),
        (sets.held_out, MIN_HELD_OUT_TASKS),
    )
    if any(len(found) < minimum for found, minimum in wanted):
        raise TaskSetError(
            f"prompt tuning needs at least {MIN_TRAIN_TASKS} training, {MIN_VALIDATION_TASKS} validation and "
            f"{MIN_HELD_OUT_TASKS} "
            f"held-out tasks, {MIN_TRAIN_TASKS + MIN_VALIDATION_TASKS + MIN_HELD_OUT_TASKS} different ones in "
            "all; this task set has "
            f"{len(sets.train)}, {len(sets.validation)} and {len(sets.held_out)}: add tasks"
        )
    every: Sequence[str] = [*sets.train, *sets.validation, *sets.held_out]
    assert len(set(every)) == len(every), "training, validation and held-out tasks overlap"
