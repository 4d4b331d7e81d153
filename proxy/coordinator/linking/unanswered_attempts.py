"""Calls that ended without an answer: a repeated request under the same key continues their trajectory.

SDKs announce a retry (`x-stainless-retry-count`) and wait at most a minute. A client that repeats its request without
that header is matched for `RESEND_WINDOW` seconds. Each attempt is matched once and removed after `RETRY_WINDOW`
seconds. Memory is bounded, in total and per key. Answered calls are not kept here: a new trajectory with the same
prompt would look the same.
"""

from __future__ import annotations

from collections import deque

from ratchet.proxy.messages.link_records import AttemptKey, Link
from ratchet.proxy.runtime.byte_quotas import ByteQuotas

RETRY_WINDOW = 120.0
RESEND_WINDOW = 60.0
_MAX_PER_PROMPT = 64
_BYTES = 800  # of an attempt: its link, its prompt's hash, its entries in the tables


class UnansweredAttempts:
    """Unanswered attempts by key and prompt."""

    def __init__(self, max_bytes: int, max_bytes_per_key: int) -> None:
        self._waiting: dict[AttemptKey, deque[tuple[Link, float]]] = {}  # oldest first
        self._quotas: ByteQuotas[AttemptKey] = ByteQuotas(max_bytes, max_bytes_per_key)

    def __len__(self) -> int:
        return sum(len(waiting) for waiting in self._waiting.values())

    @property
    def bytes(self) -> int:
        """The estimated memory use."""
        return self._quotas.bytes

    def add(self, attempt: AttemptKey, link: Link, now: float) -> None:
        """Add an attempt that ended without an answer."""
        waiting = self._waiting.pop(attempt, None)
        if waiting is None:
            waiting = deque(maxlen=_MAX_PER_PROMPT)
        more = 0 if len(waiting) == _MAX_PER_PROMPT else _BYTES
        waiting.append((link, now))
        self._waiting[attempt] = waiting
        self._quotas.add_use(attempt.key_id, attempt, more)
        for _ in range(2):
            first = next(iter(self._waiting))
            if self._waiting[first][-1][1] < now - RETRY_WINDOW:
                self._remove(first)
        while (excess := self._quotas.next_to_evict(attempt.key_id)) is not None:
            self._remove(excess)

    def take(self, attempt: AttemptKey, since: float) -> Link | None:
        """Return the link of the earliest attempt after `since`; remove it and those before."""
        waiting = self._waiting.get(attempt)
        found = None
        while waiting and found is None:
            link, ended_at = waiting.popleft()
            self._quotas.add_use(attempt.key_id, attempt, -_BYTES)
            found = link if ended_at >= since else None
        if waiting is not None and not waiting:
            self._remove(attempt)
        return found

    def _remove(self, attempt: AttemptKey) -> None:
        waiting = self._waiting.pop(attempt)
        self._quotas.remove(attempt.key_id, attempt, len(waiting) * _BYTES)
