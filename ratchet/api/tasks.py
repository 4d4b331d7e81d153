"""Task sets in Python: one split of a folder, a file, a hub name or an imported set, read row by row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ratchet.trainer.tasks import TRAIN, TaskSet, ending


class Tasks:
    """The tasks of one split. Iterating yields each different row once; nothing is held in memory.

    source     a folder, a file, a name of the Hugging Face hub, or a set of `ratchet tasks import`
    split      the split to read
    test_size  the share of the tasks to hold out as the split `test`, for a set that has one split only
    seed       draws another such share

    Raises TaskSetError: there is no such set, split or row.
    """

    def __init__(
        self, source: str | Path, *, split: str = TRAIN, test_size: float | None = None, seed: int = 0
    ) -> None:
        found = _open(source)
        self.source, self.test_size, self.seed = str(source), test_size, seed
        self._set = found if test_size is None else found.split(1 - test_size, seed)
        self._set.check(split)
        self.split = split

    @property
    def name(self) -> str:
        """The name of the set."""
        return self._set.name

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the set's splits, train first."""
        return self._set.splits()

    def preview(self, n: int = 2) -> list[Mapping[str, Any]]:
        """Return the first rows."""
        return self._set.preview(self.split, n)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return (task.row for task in self._set.rows(self.split))

    def __repr__(self) -> str:
        return f"Tasks({self._set.source!r}, split={self.split!r})"


def _open(source: str | Path) -> TaskSet:
    path = Path(source)
    if ending(path) and path.is_file():  # needs no settings, which take longer to read
        return TaskSet.open(source)
    from ratchet.settings.load_settings import load
    from ratchet.tuner.tasks.imported import ImportedTasks

    return ImportedTasks(load().state.tasks).open(str(source))
