"""Reports what this worker counts under limits, about every `_INTERVAL` while it does: `limits/sharing.py`.

Belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial

from ratchet.proxy.coordinator.limits.sharing import Counted
from ratchet.proxy.messages.coordinator_messages import Amounts, Answer, Levels
from ratchet.proxy.messages.limit_records import Amount

_INTERVAL = 0.1  # seconds between two reports

Ask = Callable[[Amounts], "asyncio.Future[Answer | None]"]


class LimitReports:
    """The service. `workers`: how many share the limits, until the coordinator says so."""

    def __init__(self, workers: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.workers = workers
        self._clock = clock
        self._ask: Ask | None = None  # None: the coordinator is away
        self._changed: dict[Counted, None] = {}  # since their last report, in this order
        self._is_asking = False
        self._is_urgent = False
        self._timer: asyncio.TimerHandle | None = None
        self._sent_at = float("-inf")

    @property
    def parts(self) -> int:
        """Among how many processes each limit is divided: all, while the coordinator is away."""
        return self.workers if self._ask is None else 1

    def connect(self, ask: Ask) -> None:
        """The coordinator is there: report what was taken meanwhile. `ask` sends a report."""
        self._ask = ask
        self.send()

    def disconnect(self) -> None:
        """The coordinator is away."""
        self._ask = None
        self._cancel_timer()

    def on_use(self, counted: Counted, *, urgent: bool = False) -> None:
        """Report an amount soon; `urgent`: with the messages of this turn of the event loop, or once the one under way
        is answered.
        """
        self._changed[counted] = None
        self._is_urgent = self._is_urgent or urgent
        self._schedule()

    def send(self) -> None:
        """Send what has changed, unless a report is under way."""
        self._cancel_timer()
        if self._ask is None or self._is_asking or not self._changed:
            return
        changed, self._changed, self._is_urgent = list(self._changed), {}, False
        self._sent_at = now = self._clock()
        amounts = tuple([one.report(now) for one in changed])
        self._is_asking = True
        self._ask(Amounts(amounts)).add_done_callback(partial(self._on_answer, changed, amounts))

    def _on_answer(
        self, sent: Sequence[Counted], amounts: Sequence[Amount], done: asyncio.Future[Answer | None]
    ) -> None:
        self._is_asking = False
        answer = done.result()
        if isinstance(answer, Levels):
            self.workers, now = answer.workers, self._clock()
            for one, level in zip(sent, answer.levels, strict=True):
                one.adopt(level, now)
        else:
            for one, amount in zip(sent, amounts, strict=True):
                one.restore(amount)
                self._changed[one] = None
        self._schedule()

    def _schedule(self) -> None:
        if self._ask is None or self._is_asking or not self._changed:
            return
        if self._is_urgent:
            self._cancel_timer()
        if self._timer is None:
            wait = 0.0 if self._is_urgent else max(0.0, self._sent_at + _INTERVAL - self._clock())
            self._timer = asyncio.get_running_loop().call_later(wait, self.send)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
