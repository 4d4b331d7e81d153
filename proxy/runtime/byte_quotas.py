"""Memory quotas per API key, with least-recently-used eviction.

Promises: a key above its own limit evicts its own entries. If the total is above the limit, the key that holds the
most evicts. So no key loses entries to a key that holds more. All unverified keys count as one.

Sizes are the caller's estimates. Call from one thread, or under one lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ratchet.store.ids import owner

Name = TypeVar("Name", bound=Hashable)


@dataclass(slots=True)
class _KeyUsage(Generic[Name]):
    bytes: int = 0
    names: OrderedDict[Name, None] = field(default_factory=OrderedDict)  # least recently used first


class ByteQuotas(Generic[Name]):
    """Bytes by key and name: at most `max_bytes` in total and `max_bytes_per_key` per key."""

    def __init__(self, max_bytes: int, max_bytes_per_key: int) -> None:
        self._max_bytes = max_bytes
        self._max_bytes_per_key = max_bytes_per_key
        self._always_within = min(max_bytes, max_bytes_per_key)  # at or below this total no limit can be exceeded
        self._usage: dict[str, _KeyUsage[Name]] = {}
        self.bytes = 0

    def bytes_of(self, key_id: str | None) -> int:
        """Return the bytes that a key holds."""
        usage = self._usage.get(owner(key_id))
        return usage.bytes if usage else 0

    def add_use(self, key_id: str | None, name: Name, more: int = 0) -> None:
        """Mark an entry as used now; it grows by `more` bytes (or shrinks, if negative)."""
        key = key_id if key_id in self._usage else owner(key_id)
        usage = self._usage.get(key)
        if usage is None:
            usage = self._usage[key] = _KeyUsage()
        usage.names[name] = None
        usage.names.move_to_end(name)
        usage.bytes += more
        self.bytes += more

    def remove(self, key_id: str | None, name: Name, size: int) -> None:
        """Remove an entry of `size` bytes."""
        key = owner(key_id)
        usage = self._usage.get(key)
        if usage is None or name not in usage.names:
            return
        del usage.names[name]
        usage.bytes -= size
        self.bytes -= size
        if not usage.names:
            self.bytes -= usage.bytes
            del self._usage[key]

    def next_to_evict(self, key_id: str | None) -> Name | None:
        """Return the entry to evict after this key grew; None if every limit is met."""
        if self.bytes <= self._always_within:
            return None
        usage = self._usage.get(owner(key_id))
        if usage is not None and usage.bytes > self._max_bytes_per_key:
            return next(iter(usage.names))
        if self.bytes <= self._max_bytes or not self._usage:
            return None
        return next(iter(max(self._usage.values(), key=lambda one: one.bytes).names))
