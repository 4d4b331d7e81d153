"""Task sets of a project: imported copies, opened by name, and mixtures of several that train one adapter.

Imports are copies in the state folder, one JSONL file per split. An import is atomic, also if it is killed or the disk
is full: a replaced set stays until the new one is complete. Equal rows are stored once and counted; tasks in more than
one split are counted, so that nobody evaluates on training tasks unknowingly.

A family is a task set with a name and a weight. Each task of a round belongs to a family drawn by weight; within a
family, tasks come in shuffled order, each once before any repeats. The tasks of a round depend only on the seed and
the round number, so that an interrupted run resumes with the same tasks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import random
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ratchet.trainer.errors import PluginError, TaskSetError, TaskSetNotFound
from ratchet.trainer.tasks import TRAIN, Task, TaskSet, ending
from ratchet.trainer.user_code import OWN_PLUGINS, TASK_SOURCES, load_plugin, plugin_names

_ABOUT = "set.json"
_REPLACED = ".replaced-"  # prefix of a set's folder while it is being replaced
_NAME = re.compile(r"[\w][\w.-]{0,99}")


@dataclass(frozen=True, slots=True)
class Imported:
    """An imported set.

    splits      split -> number of tasks
    duplicates  split -> number of skipped equal rows
    in_several  number of tasks in more than one split
    """

    name: str
    source: str
    splits: dict[str, int]
    duplicates: dict[str, int] = field(default_factory=dict)
    in_several: int = 0


class ImportedTasks:
    """The imported sets of a project."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(
        self, tasks: TaskSet, name: str, *, replace: bool = False, on_row: Callable[[], object] = lambda: None
    ) -> Imported:
        """Copy a set under a name. Raises TaskSetError if the name is taken or a row is malformed."""
        place = self._place(name)
        self._recover(name)
        if place.exists() and not replace:
            raise TaskSetError(f"task set {name} already exists: give --replace, or another --name")
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".import-", dir=self._folder))
        try:
            made = _copy(tasks, name, staging, on_row)
            if place.exists():
                place.rename(self._folder / f"{_REPLACED}{name}")
            staging.rename(place)
        except OSError as error:
            raise TaskSetError(f"task set {name} cannot be written to {self._folder}: {error.strerror}") from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)
            self._recover(name)
        return made

    def _recover(self, name: str) -> None:
        """Restore a set whose replacement did not complete; otherwise delete the old one."""
        old, place = self._folder / f"{_REPLACED}{name}", self._folder / name
        if old.is_dir() and not place.exists():
            with contextlib.suppress(OSError):  # another process did it first
                old.rename(place)
        if place.exists():
            shutil.rmtree(old, ignore_errors=True)

    def all(self) -> list[Imported]:
        for old in self._folder.glob(f"{_REPLACED}*"):  # left by a killed import
            self._recover(old.name.removeprefix(_REPLACED))
        return [_read(about) for about in sorted(self._folder.glob(f"*/{_ABOUT}")) if about.parent.name[0] != "."]

    def open(self, source: str) -> TaskSet:
        """Open an imported set by its name, else a folder, a file or a hub name. Raises TaskSetNotFound."""
        if (place := self.folder_of(source)) is not None:
            about = _read(place / _ABOUT)
            return TaskSet.of_files(source, {split: place / f"{split}.jsonl" for split in about.splits})
        try:
            return open_source(source)
        except TaskSetNotFound as error:
            names = ", ".join(one.name for one in self.all())
            raise TaskSetNotFound(f"{error}; imported sets: {names or 'none'}") from error

    def folder_of(self, name: str) -> Path | None:
        if not _NAME.fullmatch(name):
            return None
        self._recover(name)
        return self._folder / name if (self._folder / name / _ABOUT).is_file() else None

    def _place(self, name: str) -> Path:
        if not _NAME.fullmatch(name) or ending(Path(name)):  # a file of that name would hide it
            raise TaskSetError(
                f"--name {name!r}: letters, digits, dots, dashes and underscores, at most 100, no suffix"
            )
        return self._folder / name


def open_source(source: str) -> TaskSet:
    """Open a folder, a file, a hub name, or NAME:REST with the name of a task source plug-in. Raises TaskSetError."""
    plugin, colon, name = source.partition(":")
    if not colon or plugin not in {*plugin_names(TASK_SOURCES), *OWN_PLUGINS[TASK_SOURCES]}:
        return TaskSet.open(source)
    try:
        opened: TaskSet = load_plugin(TASK_SOURCES, plugin)(name)
    except PluginError as error:
        raise TaskSetError(f"task set {source}: {error}") from error
    return opened


def _copy(tasks: TaskSet, name: str, staging: Path, on_row: Callable[[], object]) -> Imported:
    counts: dict[str, int] = {}
    duplicates: Counter[str] = Counter()
    splits_of: Counter[int] = Counter()
    for split in tasks.splits():
        counts[split] = 0
        with (staging / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            for task in tasks.rows(split, on_duplicate=lambda *_, split=split: duplicates.update([split])):
                file.write(json.dumps(task.row) + "\n")
                splits_of[int(task.id, 16)] += 1
                counts[split] += 1
                on_row()
    made = Imported(name, tasks.source, counts, dict(duplicates), sum(count > 1 for count in splits_of.values()))
    (staging / _ABOUT).write_text(json.dumps(asdict(made), indent=2))
    return made


def _read(about: Path) -> Imported:
    try:
        return Imported(**json.loads(about.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise TaskSetError(f"{about} is damaged ({error}): import the set again with --replace") from error


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
        known = {task.id: task for task in self.of(own or TRAIN) if task.id not in tests}
        found = [known[name] for name in sorted(known)]
        random.Random(f"{seed}/{self.name}/validation").shuffle(found)
        share = len(found) if own else max(1, len(found) // 4)
        if not found or (own is None and len(found) < 2):
            raise TaskSetError(
                f"task set {self.name} has no task left for validation: add training tasks that are not in its test "
                "split, or a split called validation"
            )
        return found[: min(limit, share)]


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
        before = sum((self._counts(earlier, count) for earlier in range(number)), Counter[str]())
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
