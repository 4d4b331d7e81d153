"""Imported task sets: copies in the project's state folder, one JSONL file per split, opened by name.

Guarantees: an import is atomic, also if it is killed or the disk is full: a replaced set stays until the new one is
complete. Equal rows are stored once and counted; tasks in more than one split are counted, so that nobody evaluates on
training tasks unknowingly.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ratchet.trainer.errors import PluginError, TaskSetError, TaskSetNotFound
from ratchet.trainer.tasks import TaskSet, ending
from ratchet.trainer.user_code.plugins import OWN_PLUGINS, TASK_SOURCES, load_plugin, plugin_names

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
        """Return all imported sets by name."""
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
            raise _with_names(error, [one.name for one in self.all()]) from error

    def folder_of(self, name: str) -> Path | None:
        """Return the folder of an imported set, or None."""
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


def _with_names(error: TaskSetNotFound, names: Sequence[str]) -> TaskSetNotFound:
    return TaskSetNotFound(f"{error}; imported sets: {', '.join(names) or 'none'}")
