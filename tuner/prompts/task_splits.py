"""Training, validation and held-out tasks of a prompt tuning, disjoint by content. Pure.

The search sees training and validation tasks; held-out tasks decide whether what it found is better. A task that stands
in both splits of a set is held out and nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from ratchet.trainer.errors import TaskSetTooSmall
from ratchet.tuner.settings.prompt_settings import MIN_HELD_OUT_TASKS, MIN_TRAIN_TASKS, MIN_VALIDATION_TASKS

_MOST_SET_ASIDE: Final = 100  # of the training split, where no number is given and there is no test split


class HasId(Protocol):
    """A task."""

    @property
    def id(self) -> str:
        """A hash of its content."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many tasks of each kind at most; held-out tasks: None for the whole test split."""

    train: int = 40
    validation: int = 40
    held_out: int | None = None


@dataclass(frozen=True, slots=True)
class Sets:
    """Ids, in the order in which they are used."""

    train: tuple[str, ...]
    validation: tuple[str, ...]
    held_out: tuple[str, ...]


def divide(
    tasks: Iterable[HasId], test: Iterable[HasId], sizes: Sizes, seed: int, validation: Iterable[HasId] = ()
) -> Sets:
    """Divide a training split, beside a test split and one for validation. Raises TaskSetTooSmall, which says how many.

    What is empty comes out of `tasks`. The same content and seed give the same sets.
    """
    held_out = list(dict.fromkeys(task.id for task in test))  # in order, as other methods take them
    checked = _shuffled(validation, seed, held_out)
    rest = _shuffled(tasks, seed, {*held_out, *checked})
    if not held_out:
        share = max(MIN_HELD_OUT_TASKS, min(sizes.held_out or _MOST_SET_ASIDE, len(rest) // 2))
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
    if any(len(found) < least for found, least in wanted):
        raise TaskSetTooSmall(
            f"prompt tuning needs at least {MIN_TRAIN_TASKS} training, {MIN_VALIDATION_TASKS} validation and "
            f"{MIN_HELD_OUT_TASKS} "
            f"held-out tasks, {MIN_TRAIN_TASKS + MIN_VALIDATION_TASKS + MIN_HELD_OUT_TASKS} different ones in "
            "all; this set gives "
            f"{len(sets.train)}, {len(sets.validation)} and {len(sets.held_out)}: add tasks"
        )
    every: Sequence[str] = [*sets.train, *sets.validation, *sets.held_out]
    assert len(set(every)) == len(every), "training, validation and held-out tasks overlap"
