"""How many bytes each key holds in a memory, what of its own it used longest ago, and who gives up something.

Promises: where a key holds more than a key may, it gives up its own; where all hold too much, the key gives up that
holds most. So nobody loses anything to a key that holds more than they do. Keys that nobody checked are one.

Sizes are estimates that whoever holds something makes. All calls come from one thread, or under one lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ratchet.store.access.ownership import owner

Name = TypeVar("Name", bound=Hashable)


@dataclass(slots=True)
class _Held(Generic[Name]):
    bytes: int = 0
    names: OrderedDict[Name, None] = field(default_factory=OrderedDict)


class ByteQuotas(Generic[Name]):
    """Bytes by key and by name, within `most` in all and `max_bytes_per_key` of a key."""

    def __init__(self, most: int, max_bytes_per_key: int) -> None:
        self._most = most
        self._most_per_key = max_bytes_per_key
        self._least = min(most, max_bytes_per_key)  # up to which nobody can hold too much
        self._held: dict[str, _Held[Name]] = {}
        self.bytes = 0

    def bytes_of(self, key_id: str | None) -> int:
        """Return the bytes that a key holds."""
        held = self._held.get(owner(key_id))
        return held.bytes if held else 0

    def add_use(self, key_id: str | None, name: Name, more: int = 0) -> None:
        """Something of a key's was used, and takes so many bytes more or, below 0, less."""
        key = key_id if key_id in self._held else owner(key_id)
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = _Held()
        held.names[name] = None
        held.names.move_to_end(name)
        held.bytes += more
        self.bytes += more

    def remove(self, key_id: str | None, name: Name, bytes_: int) -> None:
        """Something of a key's is held no more, which took so many bytes."""
        key = owner(key_id)
        held = self._held.get(key)
        if held is None or name not in held.names:
            return
        del held.names[name]
        held.bytes -= bytes_
        self.bytes -= bytes_
        if not held.names:
            self.bytes -= held.bytes
            del self._held[key]

    def next_to_evict(self, key_id: str | None) -> Name | None:
        """Return what has to be given up after a key took more: what its holder used longest ago; None for nothing."""
        if self.bytes <= self._least:
            return None
        held = self._held.get(owner(key_id))
        if held is not None and held.bytes > self._most_per_key:
            return next(iter(held.names))
        if self.bytes <= self._most or not self._held:
            return None
        return next(iter(max(self._held.values(), key=lambda one: one.bytes).names))
