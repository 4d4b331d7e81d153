"""Caches slow counts over all rows.

A count that takes longer than 20 ms is cached for twenty times its duration, so that it uses at most a twentieth of one
core, however often it is requested. Fast counts are never cached.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")

_FAST_SECONDS = 0.02
_CACHE_FACTOR = 20


class CachedCount(Generic[_T]):
    """A cached count. One thread counts at a time."""

    def __init__(self, count: Callable[[], _T]) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._value: _T | None = None
        self._until = 0.0

    def __call__(self) -> _T:
        """Return the count, at most 20 times its duration old."""
        with self._lock:
            began = time.monotonic()
            if self._value is None or began >= self._until:
                self._value = self._count()
                seconds = time.monotonic() - began
                self._until = began + (_CACHE_FACTOR * seconds if seconds > _FAST_SECONDS else 0.0)
            return self._value
