"""Resources: the files, addresses and ids in a trajectory's input, and those that its tool calls named. Pure.

Text of agents and tools is only searched for names, never followed, and the search is bounded in characters and names.
A name is recognised by its form: a path, a URL, a file with an extension, a word of letters and digits.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

_MAX_CHARS = 200_000  # of a trajectory
_MAX_NAMES = 100  # of a trajectory, in its input and in its calls each
_MAX_NAME_CHARS = 200  # longer words are not names
_MAX_REPORTED = 5  # names in an alarm
_MAX_REPORTED_CHARS = 80
_PIECE = re.compile(r"[^\s\"'`<>()\[\]{},;|\\]+")
_FILE = re.compile(r"[\w-]{2,}\.[A-Za-z][A-Za-z0-9]{0,5}")
_ID = re.compile(r"(?=[^\d]*\d)(?=[^A-Za-z]*[A-Za-z])[\w@.-]{4,}")


class HasResources(Protocol):
    """The resources of a trajectory."""

    @property
    def shown(self) -> frozenset[str]:
        """Resources in the trajectory's input."""

    @property
    def opened(self) -> frozenset[str]:
        """Resources that its tool calls named."""


@dataclass(frozen=True, slots=True)
class ResourceCoverage:
    """How many resources were shown often enough to count, and which of them were hardly ever opened."""

    shown: int
    neglected: tuple[str, ...]  # most shown first

    @property
    def share(self) -> float:
        """The share of the resources that were opened."""
        return (self.shown - len(self.neglected)) / self.shown if self.shown else 1.0

    def describe_neglected(self) -> str:
        """Return some of the neglected resources, quoted and shortened for a terminal."""
        names = (name[:_MAX_REPORTED_CHARS] for name in self.neglected[:_MAX_REPORTED])
        more = len(self.neglected) - _MAX_REPORTED
        return ", ".join(repr(name) for name in names) + (f" and {more} more" if more > 0 else "")


def resource_coverage(trajectories: Sequence[HasResources], min_shown: int, min_share: float) -> ResourceCoverage:
    """Return the coverage of resources shown to `min_shown` trajectories; opened means named by `min_share` of them."""
    shown: Counter[str] = Counter()
    opened: Counter[str] = Counter()
    for one in trajectories:
        shown.update(one.shown)
        opened.update(one.opened & one.shown)
    often = [(name, count) for name, count in shown.most_common() if count >= min_shown]
    return ResourceCoverage(len(often), tuple(name for name, count in often if opened[name] / count < min_share))


def names_in(texts: Iterable[str]) -> frozenset[str]:
    """Return the first resource names in texts."""
    found: dict[str, None] = {}
    for name in _names(texts):
        found[name] = None
        if len(found) == _MAX_NAMES:
            break
    return frozenset(found)


def _names(texts: Iterable[str]) -> Iterator[str]:
    left = _MAX_CHARS
    for text in texts:
        for piece in _PIECE.findall(text[:left]):
            name = piece.strip(".:!?=*#")
            if 3 <= len(name) <= _MAX_NAME_CHARS and _is_resource(name):
                yield name
        left -= len(text)
        if left <= 0:
            return


def _is_resource(name: str) -> bool:
    if "://" in name:
        return True
    if "/" in name:  # but not "and/or"
        return any(map(str.isalnum, name)) and (name[0] in "/~." or name.count("/") > 1 or "." in name)
    return _FILE.fullmatch(name) is not None or _ID.fullmatch(name) is not None
