"""How long to wait after the query for all agents, so that it takes a small share of the time in a large store too."""

from __future__ import annotations

from collections import deque

_MAX_SHARE = 0.02  # of the time
# Of so many queries the fastest counts: on a busy machine a single one takes a second, without a reason in the store.
_QUERIES = 3


class LookPacing:
    """The pauses between these queries; `poll_seconds` is the shortest one."""

    def __init__(self, poll_seconds: float) -> None:
        self._poll_seconds = poll_seconds
        self._latest: deque[float] = deque([0.0] * _QUERIES, maxlen=_QUERIES)

    def pause_after(self, seconds: float) -> float:
        """Return the pause in seconds after a query that took `seconds`."""
        self._latest.append(seconds)
        return max(self._poll_seconds, min(self._latest) / _MAX_SHARE)
