"""Limits that several workers share: each counts its own amounts, reports them, and learns of the others'.

A worker reports within about 100 ms (`worker/coordination/limit_reports.py`), and the coordinator answers with the
level of all (`SharedLimits`). Until a report is answered, a worker does not know what the others took meanwhile. So N
workers together exceed a limit by at most N - 1 times what one of them may take at once:

- Requests and tokens per minute: in T minutes at most limit * (T + N), where one process takes limit * (T + 1); with
  reports that are D minutes late, limit * (T + N + (N - 1) * D). The excess is a debt that all of them wait for.
- Budgets: the calls of the other workers that ended since the last answer.
- Parallel requests: `worker/http/parallel_requests.py`.

A worker without a coordinator has an equal part of each limit (`Sharing.parts`). What a worker took and did not report
before it died is forgotten; a report whose answer is lost may count twice. A coordinator that starts takes over the
levels that the workers report, so the bound holds again from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ratchet.proxy.coordinator.limits.buckets import Bucket
from ratchet.proxy.messages.limit_records import RUNNING, Amount


class Counted(Protocol):
    """An amount that a worker reports."""

    def report(self, now: float) -> Amount:
        """Return what was taken since the last report. `now`: monotonic seconds."""

    def adopt(self, level: float, now: float) -> None:
        """Take over the level of all workers, in answer to the last report."""

    def restore(self, amount: Amount) -> None:
        """Take back a report that was not answered."""


class Sharing(Protocol):
    """Reports what this process counts."""

    @property
    def parts(self) -> int:
        """Among how many processes each limit is divided; 1 while they know of each other."""

    @property
    def workers(self) -> int:
        """How many processes share the limits."""

    def on_use(self, counted: Counted, *, urgent: bool = False) -> None:
        """Report an amount soon; `urgent`: now."""


class SharedBucket(Bucket):
    """A bucket of one worker, with the amounts of all."""

    __slots__ = ("_kind", "_owner", "_part", "_sharing", "_unreported")

    def __init__(self, owner: str, kind: str, limit: int, now: float, sharing: Sharing) -> None:
        super().__init__(limit, now)
        self._owner = owner
        self._kind = kind
        self._sharing = sharing
        self._unreported = 0.0
        self._part: Bucket | None = None  # what this worker may take while the coordinator is away

    def take(self, amount: float, now: float) -> float:
        """Take an amount as `Bucket.take`; while the coordinator is away, of this worker's part, too."""
        self._sharing.on_use(self)
        part = self._divide(now)
        amount = min(amount, self.most(now))
        wait = max(self.wait(amount, now), part.wait(amount, now) if part is not None else 0.0)
        if not wait:
            self._add(-amount, now)
        return wait

    def most(self, now: float) -> float:
        """Return the most that can be taken at once."""
        part = self._divide(now)
        return self.capacity if part is None else part.capacity

    def give(self, amount: float, now: float) -> None:
        """Return an amount as `Bucket.give`."""
        self._sharing.on_use(self)
        self._divide(now)
        self._add(amount, now)

    def report(self, now: float) -> Amount:
        """Return what was taken since the last report."""
        self.wait(0, now)
        amount = Amount(self._owner, self._kind, self.limit, self._unreported, self.level)
        self._unreported = 0.0
        return amount

    def adopt(self, level: float, now: float) -> None:
        """Take over the level of all workers."""
        super().give(level - self._unreported - self.level, now)

    def restore(self, amount: Amount) -> None:
        """Take back a report that was not answered."""
        self._unreported += amount.taken

    def _add(self, amount: float, now: float) -> None:
        super().give(amount, now)
        self._unreported -= amount
        if self._part is not None:
            self._part.give(amount, now)

    def _divide(self, now: float) -> Bucket | None:
        parts = self._sharing.parts
        if parts == 1:
            self._part = None
        elif self._part is None:
            self.wait(0, now)
            self._part = Bucket(self.limit, now, parts, self.level / parts)
        return self._part


class SharedLimits:
    """What all workers took, in the coordinator."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[str, str, int], Bucket] = {}  # by owner, kind and limit
        self._budgets: dict[tuple[str, str], Amount] = {}  # by owner and kind: the newest period
        self._running: dict[str, dict[str, float]] = {}  # by owner and worker

    def count(self, worker: str, amounts: Sequence[Amount], now: float) -> tuple[float, ...]:
        """Count what a worker reports; return the level of all after each amount. `now`: monotonic seconds."""
        return tuple([self._count(worker, amount, now) for amount in amounts])

    def forget(self, worker: str) -> None:
        """Forget the running requests of a worker, which are gone."""
        for running in self._running.values():
            running.pop(worker, None)
        self._running = {owner: running for owner, running in self._running.items() if running}

    def _count(self, worker: str, amount: Amount, now: float) -> float:
        if amount.kind == RUNNING:
            return self._count_running(worker, amount)
        return self._count_budget(amount) if amount.period else self._count_bucket(amount, now)

    def _count_bucket(self, amount: Amount, now: float) -> float:
        key = (amount.owner, amount.kind, amount.limit)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = Bucket(amount.limit, now, level=amount.level)
        else:
            bucket.give(-amount.taken, now)
        return bucket.level

    def _count_budget(self, amount: Amount) -> float:
        key = (amount.owner, amount.kind)
        known = self._budgets.get(key)
        if known is None or known.period < amount.period:
            self._budgets[key] = known = amount
        elif known.period == amount.period:
            level = max(known.level + amount.taken, amount.level)
            self._budgets[key] = known = Amount(amount.owner, amount.kind, 0, 0.0, level, amount.period)
        return known.level if known.period == amount.period else amount.level

    def _count_running(self, worker: str, amount: Amount) -> float:
        running = self._running.setdefault(amount.owner, {})
        running[worker] = amount.level
        others = sum(running.values()) - amount.level
        if not amount.level:
            del running[worker]
        if not running:
            del self._running[amount.owner]
        return others
