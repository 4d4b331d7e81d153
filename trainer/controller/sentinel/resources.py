"""Resources: the files, addresses and ids that a trajectory was shown, and those that its tool calls named. Pure.

What agents and tools wrote is only read for names, never followed, and is bounded: so many characters of a trajectory,
so many names, of so many characters each. A name counts by how it is written: a path, a URL, a file with an ending, a
word of letters and digits.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

_CHARS = 200_000  # of a trajectory
_NAMES = 100  # of a trajectory, on either side
_LONGEST = 200  # characters of a name; longer ones are none
_TOLD = 5  # names in an alarm
_TOLD_CHARS = 80
_PIECE = re.compile(r"[^\s\"'`<>()\[\]{},;|\\]+")
_FILE = re.compile(r"[\w-]{2,}\.[A-Za-z][A-Za-z0-9]{0,5}")
_ID = re.compile(r"(?=[^\d]*\d)(?=[^A-Za-z]*[A-Za-z])[\w@.-]{4,}")


class Seen(Protocol):
    """A trajectory, as far as resources go."""

    @property
    def shown(self) -> frozenset[str]:
        """What stood in what it was told."""

    @property
    def opened(self) -> frozenset[str]:
        """What its tool calls named."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """How many resources were shown often enough to be judged, and which of them hardly anybody opened."""

    shown: int
    neglected: tuple[str, ...]  # the most shown first

    @property
    def share(self) -> float:
        """The share of the resources that were opened."""
        return (self.shown - len(self.neglected)) / self.shown if self.shown else 1.0

    def told(self) -> str:
        """Return some of the neglected ones, so that they cannot steer a terminal or fill it."""
        names = (name[:_TOLD_CHARS] for name in self.neglected[:_TOLD])
        more = len(self.neglected) - _TOLD
        return ", ".join(repr(name) for name in names) + (f" and {more} more" if more > 0 else "")


def coverage_of(runs: Sequence[Seen], least_runs: int, least_share: float) -> Coverage:
    """Return the coverage of what at least `least_runs` were shown; opened is what `least_share` of those named."""
    shown: Counter[str] = Counter()
    opened: Counter[str] = Counter()
    for run in runs:
        shown.update(run.shown)
        opened.update(run.opened & run.shown)
    often = [(name, count) for name, count in shown.most_common() if count >= least_runs]
    return Coverage(len(often), tuple(name for name, count in often if opened[name] / count < least_share))


def names_in(texts: Iterable[str]) -> frozenset[str]:
    """Return the first names of resources in texts, at most `_NAMES`."""
    found: dict[str, None] = {}
    for name in _names(texts):
        found[name] = None
        if len(found) == _NAMES:
            break
    return frozenset(found)


def _names(texts: Iterable[str]) -> Iterator[str]:
    left = _CHARS
    for text in texts:
        for piece in _PIECE.findall(text[:left]):
            name = piece.strip(".:!?=*#")
            if 3 <= len(name) <= _LONGEST and _is_resource(name):
                yield name
        left -= len(text)
        if left <= 0:
            return


def _is_resource(name: str) -> bool:
    if "://" in name:
        return True
    if "/" in name:  # "and/or" is none
        return any(map(str.isalnum, name)) and (name[0] in "/~." or name.count("/") > 1 or "." in name)
    return _FILE.fullmatch(name) is not None or _ID.fullmatch(name) is not None
