"""Task sets: what an agent is tuned and evaluated on; a folder, a file or a name of the Hugging Face hub.

A folder holds one file per split (train.jsonl, test.jsonl, ...; shards such as train-00000-of-00002.parquet belong
together); a single file is one split, named after the file where that is a usual name, else `train`. Rows are streamed.

Promises: a task's id follows from its content alone, whatever the format, the order of keys or the place in the file;
equal rows are one task, with a warning; a malformed row is an error that names its file and line.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratchet.trainer.errors import SplitNotFound, TaskSetEmpty, TaskSetError, TaskSetNotFound
from ratchet.trainer.tasks.file_reader import READERS, Numbered, ending, read_rows
from ratchet.trainer.tasks.hub_reader import HubSet

log = logging.getLogger(__name__)

TRAIN, TEST = "train", "test"
_USUAL = frozenset({TRAIN, TEST, "validation", "valid", "val", "dev", "eval", "held_out"})
_SHARD = re.compile(r"-\d+-of-\d+$")
_SPLIT_REMEDY = "--test-size 0.2 (in Python test_size=0.2) makes a test split of one"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class Task:
    """One task. `id` 16 hex digits of its content's hash; `number` where it stands in its split, from 1."""

    id: str
    row: Mapping[str, Any]
    split: str
    number: int
    set: str = ""  # the task set's name


@dataclass(frozen=True, slots=True)
class TaskSet:
    """A task set that can be read; nothing of it is in memory. `open` makes it."""

    name: str
    source: str
    _rows_of: Mapping[str, Callable[[], Iterator[Numbered]]]  # split -> its rows, read again at each call
    _chosen: Callable[[Task], bool] | None = None

    @classmethod
    def open(cls, source: str | Path, name: str | None = None) -> TaskSet:
        """Open a folder, a file or a hub name; `name` is what the set is called, else its own.

        Raises TaskSetNotFound.
        """
        path = Path(source).expanduser()
        own = name or _bare(path)
        if path.is_file():
            return cls(own, str(source), _of_file(path))
        if path.is_dir():
            return cls(own, str(source), _of_folder(path))
        if not _HUB_NAME.fullmatch(str(source)) or str(source)[0] in ".~" or ending(path):
            raise TaskSetNotFound(f"task set {source}: there is no such file or folder here ({Path.cwd()})")
        return cls(own, str(source), _of_hub(HubSet(str(source))))

    @classmethod
    def of_files(cls, name: str, files: Mapping[str, Path]) -> TaskSet:
        """Return the set of these files, split -> file."""
        return cls(name, name, {split: _chain([file]) for split, file in files.items()})

    @classmethod
    def of_rows(cls, name: str, source: str, rows_of: Mapping[str, Callable[[], Iterator[Numbered]]]) -> TaskSet:
        """Return the set of these rows, split -> function that yields numbered rows, called at every reading."""
        return cls(name, source, rows_of)

    def splits(self) -> tuple[str, ...]:
        """Return the names of the splits, train first."""
        return tuple(sorted(self._rows_of, key=lambda split: (split != TRAIN, split)))

    def rows(
        self, split: str, limit: int | None = None, on_duplicate: Callable[[int, int], None] | None = None
    ) -> Iterator[Task]:
        """Yield the tasks of a split, each once; `on_duplicate` hears the numbers of a row and of its repetition.

        Raises SplitNotFound, MalformedTaskRow, TaskSetEmpty.
        """
        self.check(split)
        return itertools.islice(self._tasks(split, on_duplicate), limit)

    def preview(self, split: str, n: int = 2) -> list[Mapping[str, Any]]:
        """Return the first rows of a split as they are. Raises as `rows` does."""
        self.check(split)
        if self._chosen is not None:
            return [task.row for task in self.rows(split, n)]
        found = [row for _, row in itertools.islice(self._rows_of[split](), n)]
        if not found:
            raise self._empty(split)
        return found

    def split(self, train_share: float = 0.8, seed: int = 0) -> TaskSet:
        """Return the set with its only split divided into train and test, by content: a task stays where it is.

        Raises TaskSetError where the set is split already.
        """
        if len(self._rows_of) != 1:
            raise TaskSetError(f"task set {self.name} has the splits {', '.join(self.splits())}: no --test-size")
        if not 0 < train_share < 1:
            raise TaskSetError(f"--test-size {1 - train_share:g}: it must lie between 0 and 1")
        (rows,) = self._rows_of.values()
        salt = f"{seed}:"

        def chosen(task: Task) -> bool:
            place = int(hashlib.sha256((salt + task.id).encode()).hexdigest()[:12], 16) / 16**12
            return (place < train_share) == (task.split == TRAIN)

        return TaskSet(self.name, self.source, {TRAIN: rows, TEST: rows}, chosen)

    def check(self, split: str) -> None:
        """Raise SplitNotFound where there is no such split."""
        if split not in self._rows_of:
            raise SplitNotFound(
                f"task set {self.name} has no split {split!r}; it has {', '.join(self.splits())}"
                + (f"; {_SPLIT_REMEDY}" if len(self._rows_of) == 1 else "")
            )

    def _tasks(self, split: str, on_duplicate: Callable[[int, int], None] | None) -> Iterator[Task]:
        seen: dict[int, int] = {}  # id -> number of the first row that has it
        again = 0
        for number, (_, row) in enumerate(self._rows_of[split](), 1):
            task = Task(content_id(row), row, split, number, self.name)
            if self._chosen is not None and not self._chosen(task):
                continue
            first = seen.setdefault(int(task.id, 16), number)
            if first == number:
                yield task
            elif on_duplicate is not None:
                on_duplicate(first, number)
            else:
                again += 1
        if not seen:
            raise self._empty(split)
        if again:
            log.warning("event=duplicate_tasks set=%s split=%s rows=%d kept=%d", self.name, split, again, len(seen))

    def _empty(self, split: str) -> TaskSetEmpty:
        return TaskSetEmpty(f"task set {self.name}: split {split} of {self.source} holds no row")


def content_id(row: Mapping[str, Any]) -> str:
    """Return 16 hex digits of a row's content: equal for equal rows of every format.

    Keys count in any order; null and empty text count as missing, and numbers as their text, since CSV knows no other.
    """
    text = json.dumps(_canonical(row), sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _canonical(value: Any) -> Any:
    if isinstance(value, Mapping):
        kept = {str(key): _canonical(inner) for key, inner in value.items()}
        return {key: inner for key, inner in kept.items() if inner is not None}
    if isinstance(value, (list, tuple)):
        return [_canonical(inner) for inner in value]
    if value is None or value == "":
        return None
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def split_of(file: Path) -> str:
    """Return the split that a file's name says."""
    return _SHARD.sub("", _bare(file))


def _bare(file: Path) -> str:
    """Return a file's name without the end that says how it is read."""
    return file.name[: len(file.name) - len(ending(file))]


def _of_file(file: Path) -> dict[str, Callable[[], Iterator[Numbered]]]:
    if not ending(file):
        suffix = "".join(file.suffixes[-2:]) or "no suffix"
        raise TaskSetNotFound(f"task set {file}: give one of {' '.join(READERS)} (text also as .gz), not {suffix}")
    split = split_of(file)
    return {split if split in _USUAL else TRAIN: lambda: read_rows(file)}


def _of_folder(folder: Path) -> dict[str, Callable[[], Iterator[Numbered]]]:
    files = [file for file in sorted(folder.iterdir()) if file.is_file() and ending(file)]
    shards: dict[str, list[Path]] = {}
    for file in files:
        shards.setdefault(split_of(file), []).append(file)
    shards = {split: files for split, files in shards.items() if split in _USUAL or not _is_note(files)}
    if not shards:
        if any(folder.rglob("*.parquet")) or any(folder.rglob("*.jsonl")) or (folder / "README.md").exists():
            return _of_hub(HubSet(str(folder), local=True))
        raise TaskSetNotFound(
            f"task set {folder}: the folder holds no train.jsonl or other split ({' '.join(READERS)})"
        )
    for split, files in shards.items():
        if len(files) > 1 and not all(_SHARD.search(_bare(file)) for file in files):
            raise TaskSetError(f"task set {folder}: {' and '.join(f.name for f in files)} are both split {split}")
    if len(shards) == 1 and not _USUAL & shards.keys():
        shards = {TRAIN: next(iter(shards.values()))}
    return {split: _chain(files) for split, files in shards.items()}


def _is_note(files: list[Path]) -> bool:
    """Whether files beside the splits are something else: notes and descriptions, not tasks."""
    return all(ending(file) in (".txt", ".json") for file in files)


def _chain(files: list[Path]) -> Callable[[], Iterator[Numbered]]:
    return lambda: itertools.chain.from_iterable(map(read_rows, files))


def _of_hub(hub: HubSet) -> dict[str, Callable[[], Iterator[Numbered]]]:
    def reader(split: str) -> Callable[[], Iterator[Numbered]]:
        return lambda: hub.rows(split)

    return {split: reader(split) for split in hub.splits()}
