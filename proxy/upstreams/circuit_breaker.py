"""The circuit breaker of one replica. Pure; time is a parameter, monotonic seconds.

Closed, it lets calls through. So many failures in a row open it: calls go elsewhere. When it has cooled off it is
half open: one probe may ask whether the replica is back, and closes it, or opens it anew.
"""

from __future__ import annotations

from enum import StrEnum


class BreakerState(StrEnum):
    """Whether calls go through."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half open"


class CircuitBreaker:
    """`failures` in a row open it; `cool_off` seconds later it may be probed."""

    __slots__ = ("_cool_off", "_failed", "_most", "_opened_at")

    def __init__(self, failures: int, cool_off: float) -> None:
        self._most = failures
        self._cool_off = cool_off
        self._failed = 0
        self._opened_at: float | None = None

    @property
    def closed(self) -> bool:
        """Whether calls go through."""
        return self._opened_at is None

    def state(self, now: float) -> BreakerState:
        """Return the state at a moment."""
        if self._opened_at is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now - self._opened_at < self._cool_off else BreakerState.HALF_OPEN

    def opens_in(self, now: float) -> float | None:
        """Return the seconds until it may be probed; None while it is closed."""
        return None if self._opened_at is None else max(0.0, self._opened_at + self._cool_off - now)

    def fail(self, now: float) -> bool:
        """Take note of a failure; return whether it opened the breaker."""
        self._failed += 1
        opened = self.closed and self._failed >= self._most
        if opened or self.state(now) == BreakerState.HALF_OPEN:
            self._opened_at = now
        return opened

    def succeed(self) -> bool:
        """Take note of a success; return whether it closed the breaker."""
        opened = not self.closed
        self._failed = 0
        self._opened_at = None
        return opened
