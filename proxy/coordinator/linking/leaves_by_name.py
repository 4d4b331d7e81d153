"""Answers by any name: under each, the oldest first. Bounded: under one name the oldest are forgotten first."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable
from typing import Generic, TypeVar

from ratchet.proxy.messages.link_records import Leaf

_MOST_EQUAL = 4_096

Name = TypeVar("Name")


class LeavesByName(Generic[Name]):
    """Leaves by name."""

    def __init__(self) -> None:
        self._by: dict[Name, Leaf | dict[Leaf, None]] = {}  # one by itself: most names have no other

    def __len__(self) -> int:
        return len(self._by)

    @property
    def names(self) -> Container[Name]:
        """The names."""
        return self._by

    def at(self, name: Name) -> Collection[Leaf]:
        """Return the leaves of this name."""
        same = self._by.get(name, ())
        return (same,) if isinstance(same, Leaf) else same

    def add(self, name: Name, leaf: Leaf) -> bool:
        """Remember a leaf under a name; return whether it is the first."""
        same = self._by.get(name)
        if same is None:
            self._by[name] = leaf
            return True
        if isinstance(same, Leaf):
            if same is leaf:
                return False
            same = self._by[name] = {same: None}
        same[leaf] = None
        if len(same) > _MOST_EQUAL:
            del same[next(iter(same))]
        return False

    def add_all(self, names: Iterable[Name], leaf: Leaf) -> None:
        """Remember a leaf under several names."""
        known = self._by
        for name in names:
            if known.setdefault(name, leaf) is not leaf:
                self.add(name, leaf)

    def drop(self, name: Name, leaf: Leaf) -> bool:
        """Forget a leaf under a name; return whether it was the last."""
        same = self._by.get(name)
        if isinstance(same, dict):
            same.pop(leaf, None)
        if same is leaf or same == {}:
            del self._by[name]
            return True
        return False
