"""Token budgets of a key: prompt and completion tokens per UTC day and per UTC month.

A call that begins within the budget is served to its end, so that parallel calls may exceed it together. What is used
up is what the store has counted, of all proxies; between two reads, and while the store is down, the calls of this
process count in addition, and those of the other workers (`sharing.py`). So a budget outlives restarts, and an outage
of the store does not lift it.

Time is a parameter; all state belongs to the event loop's thread.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from ratchet.proxy.coordinator.limits.sharing import Sharing
from ratchet.proxy.errors import RateLimited
from ratchet.proxy.messages.limit_records import Amount
from ratchet.store.operation_records import KeyTokens


class Budgets(NamedTuple):
    """The limits in tokens; None: no limit."""

    per_day: int | None = None
    per_month: int | None = None


class _Period:
    """The tokens of the current day or month, by its name (`2026-11-23`, `2026-11`)."""

    __slots__ = ("_before", "_own", "_owner", "_shared", "_sharing", "_stored", "_unreported", "name")

    def __init__(self, name: str, stored: int, owner: str, sharing: Sharing | None) -> None:
        self.name = name
        self._stored = stored
        self._before = stored  # at the first read: what this process did not count itself
        self._own = 0
        self._owner = owner
        self._sharing = sharing
        self._shared = 0  # what all workers have counted
        self._unreported = 0

    @property
    def used(self) -> int:
        return max(self._stored, self._before + self._own, self._shared + self._unreported)

    def add(self, tokens: int) -> None:
        self._own += tokens
        if self._sharing is not None:
            self._unreported += tokens
            self._sharing.on_use(self)

    def read(self, stored: int) -> None:
        self._stored = stored

    def ask(self) -> None:
        """Learn what the other workers have counted."""
        if self._sharing is not None:
            self._sharing.on_use(self)

    # --- Counted ----------------------------------------------------------------------------------------------

    def report(self, now: float) -> Amount:
        taken, level = self._unreported, self.used
        self._unreported, self._shared = 0, level
        return Amount(self._owner, "month" if len(self.name) < len("2026-11-23") else "day", 0, taken, level, self.name)

    def adopt(self, level: float, now: float) -> None:
        self._shared = max(self._shared, int(level))

    def restore(self, amount: Amount) -> None:
        self._shared -= int(amount.taken)
        self._unreported += int(amount.taken)


class TokenBudget:
    """The budgets of one key, and what is used up of them. `sharing`: with other workers, which know it as `owner`."""

    def __init__(self, budgets: Budgets, stored: KeyTokens, owner: str = "", sharing: Sharing | None = None) -> None:
        self.budgets = budgets
        self._owner = owner
        self._sharing = sharing
        self._day = self._period(stored.day, stored.today)
        self._month = self._period(stored.day[:7], stored.this_month)

    def read(self, stored: KeyTokens) -> None:
        """Take over what the store has counted."""
        self._begin(stored.day)
        if stored.day == self._day.name:
            self._day.read(stored.today)
        if stored.day[:7] == self._month.name:
            self._month.read(stored.this_month)

    def add(self, tokens: int, now: float) -> None:
        """Count the tokens of a call that has ended."""
        self._begin(_day(now))
        self._day.add(tokens)
        self._month.add(tokens)

    def check(self, now: float) -> None:
        """Raise RateLimited if a budget is used up."""
        self._begin(_day(now))
        for limit, period, unit in (
            (self.budgets.per_month, self._month, "month"),
            (self.budgets.per_day, self._day, "day"),
        ):
            if limit is None:
                continue
            period.ask()
            if period.used >= limit:
                raise _used_up(limit, period.used, unit, now)

    def _begin(self, day: str) -> None:
        """Begin a new day or month; time never goes back."""
        if day > self._day.name:
            self._day = self._period(day, 0)
        if day[:7] > self._month.name:
            self._month = self._period(day[:7], 0)

    def _period(self, name: str, stored: int) -> _Period:
        return _Period(name, stored, self._owner, self._sharing)


def _used_up(limit: int, used: int, unit: str, now: float) -> RateLimited:
    resets = _next(unit, now)
    seconds = max(1, int(resets.timestamp() - now) + 1)
    return RateLimited(
        f"the key's budget of {limit:,} tokens per {unit} is used up ({used:,} tokens): it starts again at "
        f"{resets:%Y-%m-%d %H:%M} UTC; for more now, ask the operator for a larger budget (`ratchet keys update`)",
        code="token_budget_exceeded",
        kind="tokens",
        # SDKs would wait for so long, or repeat what cannot succeed; this header keeps them from it.
        headers=[(b"retry-after", b"%d" % seconds), (b"x-should-retry", b"false")],
    )


def _next(unit: str, now: float) -> datetime:
    today = datetime.fromtimestamp(now, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if unit == "day":
        return today + timedelta(days=1)
    return (today.replace(day=1) + timedelta(days=32)).replace(day=1)


def _day(now: float) -> str:
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%d")
