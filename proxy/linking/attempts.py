"""Attempts that nobody got an answer to: who asks the same again under the same key goes on with their run.

An SDK says so (`x-stainless-retry-count`) and waits for a minute at most; an agent that asks again by itself does not
say so, and is believed for `RESENT_WITHIN` seconds. Each attempt is given once. Bounded. An attempt that was answered
is none of these: another run of the same prompt would look the same.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from proxy.linking.leaf import Attempt, Link

RETRIED_WITHIN = 120.0
RESENT_WITHIN = 60.0
_MOST = 10_000  # prompts that nobody got an answer to
_MOST_SAME = 64  # attempts with one prompt


class Attempts:
    """Unanswered attempts, by what names them."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[Attempt, deque[tuple[Link, float]]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(waiting) for waiting in self._waiting.values())

    def add(self, attempt: Attempt, link: Link, now: float) -> None:
        """Remember an attempt that ended without an answer."""
        self._waiting.setdefault(attempt, deque(maxlen=_MOST_SAME)).append((link, now))
        self._waiting.move_to_end(attempt)
        while len(self._waiting) > _MOST:
            self._waiting.popitem(last=False)

    def take(self, attempt: Attempt, since: float) -> Link | None:
        """Return the run of the earliest attempt after `since`, and forget it and those before."""
        waiting = self._waiting.get(attempt)
        found = None
        while waiting and found is None:
            link, ended_at = waiting.popleft()
            found = link if ended_at >= since else None
        if waiting is not None and not waiting:
            del self._waiting[attempt]
        return found
