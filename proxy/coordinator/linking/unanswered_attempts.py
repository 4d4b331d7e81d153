"""Attempts that nobody got an answer to: who asks the same again under the same key goes on with their run.

An SDK says so (`x-stainless-retry-count`) and waits for a minute at most; an agent that asks again by itself does not
say so, and is believed for `RESEND_WINDOW` seconds. Each attempt is given once, and forgotten after `RETRY_WINDOW`
seconds. Bounded in bytes, in all and per key. An attempt that was answered is none of these: another run of the same
prompt would look the same.
"""

from __future__ import annotations

from collections import deque

from ratchet.proxy.messages.link_records import AttemptKey, Link
from ratchet.proxy.runtime.byte_quotas import ByteQuotas

RETRY_WINDOW = 120.0
RESEND_WINDOW = 60.0
_MOST_SAME = 64  # attempts with one prompt
_BYTES = 800  # of an attempt: its link, its prompt's name, its places in the tables


class UnansweredAttempts:
    """Unanswered attempts, by what names them."""

    def __init__(self, max_bytes: int, max_bytes_per_key: int) -> None:
        self._waiting: dict[AttemptKey, deque[tuple[Link, float]]] = {}  # those that waited longest first
        self._quotas: ByteQuotas[AttemptKey] = ByteQuotas(max_bytes, max_bytes_per_key)

    def __len__(self) -> int:
        return sum(len(waiting) for waiting in self._waiting.values())

    @property
    def bytes(self) -> int:
        """What they take, as an estimate."""
        return self._quotas.bytes

    def add(self, attempt: AttemptKey, link: Link, now: float) -> None:
        """Remember an attempt that ended without an answer."""
        waiting = self._waiting.pop(attempt, None)
        if waiting is None:
            waiting = deque(maxlen=_MOST_SAME)
        more = 0 if len(waiting) == _MOST_SAME else _BYTES
        waiting.append((link, now))
        self._waiting[attempt] = waiting
        self._quotas.add_use(attempt.key_id, attempt, more)
        for _ in range(2):
            first = next(iter(self._waiting))
            if self._waiting[first][-1][1] < now - RETRY_WINDOW:
                self._forget(first)
        while (excess := self._quotas.next_to_evict(attempt.key_id)) is not None:
            self._forget(excess)

    def take(self, attempt: AttemptKey, since: float) -> Link | None:
        """Return the run of the earliest attempt after `since`, and forget it and those before."""
        waiting = self._waiting.get(attempt)
        found = None
        while waiting and found is None:
            link, ended_at = waiting.popleft()
            self._quotas.add_use(attempt.key_id, attempt, -_BYTES)
            found = link if ended_at >= since else None
        if waiting is not None and not waiting:
            self._forget(attempt)
        return found

    def _forget(self, attempt: AttemptKey) -> None:
        waiting = self._waiting.pop(attempt)
        self._quotas.remove(attempt.key_id, attempt, len(waiting) * _BYTES)
