"""The circuit breaker of one replica. Pure; time is a parameter, monotonic seconds.

closed     the replica receives calls; consecutive failures open the breaker
open       calls go to other replicas until it has cooled off
half open  one probe may check the replica; it closes the breaker or opens it again
"""

from __future__ import annotations

from enum import StrEnum


class BreakerState(StrEnum):
    """The states."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half open"


class CircuitBreaker:
    """Opens after `failures` consecutive failures; may be probed `cool_off` seconds later."""

    __slots__ = ("_cool_off", "_failures", "_max_failures", "_opened_at")

    def __init__(self, failures: int, cool_off: float) -> None:
        self._max_failures = failures
        self._cool_off = cool_off
        self._failures = 0
        self._opened_at: float | None = None

    @property
    def closed(self) -> bool:
        """Whether calls go through."""
        return self._opened_at is None

    def state(self, now: float) -> BreakerState:
        """Return the state at time `now`."""
        if self._opened_at is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now - self._opened_at < self._cool_off else BreakerState.HALF_OPEN

    def seconds_until_probe(self, now: float) -> float | None:
        """Return the seconds until it may be probed; None while closed."""
        return None if self._opened_at is None else max(0.0, self._opened_at + self._cool_off - now)

    def fail(self, now: float) -> bool:
        """Record a failure; return whether it opened the breaker."""
        self._failures += 1
        opened = self.closed and self._failures >= self._max_failures
        if opened or self.state(now) == BreakerState.HALF_OPEN:
            self._opened_at = now
        return opened

    def succeed(self) -> bool:
        """Record a success; return whether it closed the breaker."""
        opened = not self.closed
        self._failures = 0
        self._opened_at = None
        return opened
