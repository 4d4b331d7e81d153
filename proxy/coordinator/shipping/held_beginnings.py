"""Beginnings of calls that wait for their ends, so that the store gets a call at once and whole.

The position of shipping stays at the first of them: after a crash they are read again. Times are monotonic seconds.
Belongs to the shipper's thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ratchet.proxy.coordinator.shipping.store_writer import WriteResult

HOLD_SECONDS = 5.0  # at most; who waits for what other proxies recorded waits longer


class _Held(NamedTuple):
    """Where a beginning is: in the segment, and among the records that were read."""

    offset: int
    place: int
    since: float


class HeldBeginnings:
    """The beginnings that were left out of the store, all of one segment, and what was read."""

    def __init__(self, hold_seconds: float = HOLD_SECONDS) -> None:
        self._hold_seconds = hold_seconds
        self.read = 0  # records
        self._held: dict[str, _Held] = {}  # by call, oldest first

    def __len__(self) -> int:
        return len(self._held)

    @property
    def offset(self) -> int | None:
        """Where the first of them is in the segment; None if there is none."""
        return next((one.offset for one in self._held.values()), None)

    @property
    def stored_in_order(self) -> int:
        """How many of the records that were read are before the first of them."""
        return next((one.place for one in self._held.values()), self.read)

    def due(self, now: float) -> frozenset[str]:
        """Return the calls whose beginnings have waited long enough."""
        return frozenset(name for name, one in self._held.items() if now - one.since >= self._hold_seconds)

    def offsets(self) -> dict[str, int]:
        """Return the offsets of all, by call."""
        return {name: one.offset for name, one in self._held.items()}

    def note(self, result: WriteResult, written: Iterable[str], now: float) -> int:
        """Note a range that was read, and the beginnings that were written; return how many records are stored now."""
        over = [name for name in (*written, *result.ended) if self._held.pop(name, None) is not None]
        for one in result.held:
            self._held[one.call_id] = _Held(one.offset, self.read + one.place, now)
        self.read += result.records
        return result.records - len(result.held) + len(over)

    def forget(self) -> None:
        """Their segment is lost: they were not read."""
        self.read -= len(self._held)
        self._held.clear()
