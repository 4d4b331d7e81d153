"""Counts over all rows: remembered for as long as counting is dear.

A count that takes more than a moment is given again until twenty times its own cost has passed, so that it takes at
most a twentieth of one core, however often it is asked for. Where counting is quick every answer is fresh.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")

_QUICK = 0.02  # seconds
_TIMES = 20


class CachedCount(Generic[_T]):
    """One count. One thread counts at a time."""

    def __init__(self, count: Callable[[], _T]) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._value: _T | None = None
        self._until = 0.0

    def __call__(self) -> _T:
        """Return the count, at most as old as it was dear."""
        with self._lock:
            began = time.monotonic()
            if self._value is None or began >= self._until:
                self._value = self._count()
                took = time.monotonic() - began
                self._until = began + (_TIMES * took if took > _QUICK else 0.0)
            return self._value
