"""Which messages are durable already: the hashes of some 25,000 to 50,000, those that were written last.

It remembers in two halves: when the young one is full it becomes the old one, and the old one goes. What it has
forgotten is written again when it comes again, which costs bytes and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable

_HALF = 25_000


class DurableMessages:
    """The hashes of durable messages and tool lists."""

    def __init__(self, half: int = _HALF) -> None:
        self._half = half
        self._young: set[str] = set()
        self._old: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._young or name in self._old

    def add(self, names: Iterable[str]) -> None:
        """Remember what was made durable."""
        self._young.update(names)
        if len(self._young) >= self._half:
            self._old, self._young = self._young, set()

    def clear(self) -> None:
        """Forget everything."""
        self._old, self._young = set(), set()
