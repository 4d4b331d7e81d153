"""A sequence whose first items are computed, all at once, when one of them is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar, overload

_T = TypeVar("_T")


class LazySequence(Sequence[_T]):
    """A sequence of `missing` items, which are the first ones that `load` returns, and a known tail."""

    __slots__ = ("_load", "_missing", "_tail")

    def __init__(self, missing: int, tail: Sequence[_T], load: Callable[[], Sequence[_T]]) -> None:
        self._missing = missing
        self._tail = tail
        self._load = load

    def __len__(self) -> int:
        return self._missing + len(self._tail)

    @overload
    def __getitem__(self, place: int) -> _T: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[_T]: ...

    def __getitem__(self, place: int | slice) -> _T | Sequence[_T]:
        if isinstance(place, slice):
            start, stop, step = place.indices(len(self))
            if step == 1 and start >= self._missing:
                return self._tail[start - self._missing : max(stop - self._missing, 0)]
            return self._all()[place]
        index = place + len(self) if place < 0 else place
        return self._tail[index - self._missing] if index >= self._missing else self._all()[place]

    def __iter__(self) -> Iterator[_T]:
        return iter(self._all())

    def _all(self) -> Sequence[_T]:
        if self._missing:
            self._tail, self._missing = [*self._load()[: self._missing], *self._tail], 0
        return self._tail
