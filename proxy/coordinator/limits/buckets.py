"""A token bucket: a limit per minute, with a capacity of one minute. Time is a parameter, in monotonic seconds."""

from __future__ import annotations

_MINUTE = 60.0


class Bucket:
    """A token bucket. `parts`: it has such a part of the limit only, at least a capacity of 1."""

    __slots__ = ("_at", "_rate", "capacity", "level", "limit")

    def __init__(self, limit: int, now: float, parts: int = 1, level: float | None = None) -> None:
        self.limit = limit
        self.capacity = max(1.0, limit / parts)
        self.level = self.capacity if level is None else min(level, self.capacity)  # negative while in debt
        self._rate = limit / parts / _MINUTE
        self._at = now

    def take(self, amount: float, now: float) -> float:
        """Take an amount, at most a full bucket, and return 0.0; or return the seconds to wait for it."""
        wait = self.wait(amount, now)
        if not wait:
            self.level -= min(amount, self.capacity)
        return wait

    def wait(self, amount: float, now: float) -> float:
        """Return the seconds until an amount, at most a full bucket, can be taken."""
        self._fill(now)
        return max(0.0, min(amount, self.capacity) - self.level) / self._rate

    def most(self, now: float) -> float:
        """Return the most that can be taken at once."""
        return self.capacity

    def give(self, amount: float, now: float) -> None:
        """Return an unused amount; a negative amount takes more, into debt if necessary."""
        self._fill(now)
        self.level = min(self.capacity, self.level + amount)

    def full_in(self, now: float) -> float:
        """Return the seconds until the bucket is full again."""
        self._fill(now)
        return (self.capacity - self.level) / self._rate

    def _fill(self, now: float) -> None:
        self.level = min(self.capacity, self.level + max(0.0, now - self._at) * self._rate)
        self._at = now
