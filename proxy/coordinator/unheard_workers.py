"""The workers whose calls the coordinator may not know: it does not hear of them, or they died unheard.

A worker that is cut off serves alone, from `ALONE_SECONDS` after the coordinator's last answer that it received. The
coordinator assumes so earlier, `_SILENT_TICKS` after the last one that it knows to have been received, until the worker
has reported what it served: itself, or, if it died, by the store, which has its journal once it begins again. A message
that the network has delayed for that long ends no doubt: its worker may serve alone since. One that does not come back
is forgotten when the trajectories that it served are closed for linking. Belongs to the event loop's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from ratchet.proxy.coordinator.linking.cautious_linker import Doubt

TICK_SECONDS = 0.5
ALONE_SECONDS = 6.0  # the margin is for calls that the coordinator is placing
_SILENT_TICKS = 9  # a worker sends something every second, and with it what it received a second ago
_RECENT_SECONDS = 120.0  # in which a call without history may be a retry, a sub-agent's, or follow a compaction


class UnheardWorkers:
    """Those workers, by name. `own`: this machine's, never cut off; `seconds`: how long trajectories stay open."""

    def __init__(self, own: Collection[str], seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._own = frozenset(own)
        self._seconds = seconds
        self._clock = clock
        self._ticks: dict[str, int] = {}  # without a word, of each worker that has a session
        self._unheard: set[str] = set()  # of these, the ones that may serve alone
        self._missing: dict[str, float] = {}  # since when

    def doubt(self) -> Doubt:
        """Return which calls may be missing."""
        if self._unheard:
            return Doubt.RECENT
        if not self._missing:
            return Doubt.NONE
        now = self._clock()
        for worker in [worker for worker, since in self._missing.items() if now - since > self._seconds]:
            del self._missing[worker]
        latest = max(self._missing.values(), default=float("-inf"))
        if latest < now - _RECENT_SECONDS:
            return Doubt.EARLIER if self._missing else Doubt.NONE
        return Doubt.RECENT

    def hear(self, worker: str, age: float) -> bool:
        """A worker with a session has sent something; return whether it is not old.

        `age`: how long ago the coordinator sent the latest answer that the worker had received by then.
        """
        if age >= _SILENT_TICKS * TICK_SECONDS:
            self._ticks.setdefault(worker, 0)
            return False
        self._ticks[worker] = int(max(0.0, age) / TICK_SECONDS)
        self._unheard.discard(worker)
        return True

    def expect(self, worker: str) -> None:
        """A worker with a session may have served alone since its report: it must be heard again."""
        self._unheard.add(worker)

    def tick(self, seconds: float) -> None:
        """Count a tick that took some seconds: after one that was too long, every worker must be heard again."""
        hung = seconds >= _SILENT_TICKS * TICK_SECONDS
        for worker in self._ticks:
            self._ticks[worker] += 1
            if hung or (self._ticks[worker] >= _SILENT_TICKS and worker not in self._own):
                self._unheard.add(worker)

    def silent_seconds(self, worker: str) -> float:
        """Return for how long a worker with a session has been silent."""
        return self._ticks.get(worker, 0) * TICK_SECONDS

    def end(self, worker: str) -> None:
        """A worker's session has ended; what it served unheard is missing."""
        self._ticks.pop(worker, None)
        if worker in self._unheard:
            self._unheard.discard(worker)
            self.miss(worker)

    def leave(self, worker: str) -> None:
        """A worker has stopped, and reported everything."""
        self._ticks.pop(worker, None)
        self._unheard.discard(worker)
        self._missing.pop(worker, None)

    def miss(self, worker: str) -> None:
        """A worker's calls are missing."""
        self._missing.setdefault(worker, self._clock())

    def is_missing(self, worker: str) -> bool:
        """Return whether a worker's calls are missing."""
        return worker in self._missing

    def find(self, worker: str) -> None:
        """The calls of a worker are known again."""
        self._missing.pop(worker, None)
