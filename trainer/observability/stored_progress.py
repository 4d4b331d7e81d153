"""Standings: how far the trainer's long works are, written into the store for who watches from elsewhere.

Promises: a work costs one small write in `every` seconds at most, and one at its end; a store that is away costs the
work nothing but the line in the log.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ratchet.store.errors import StoreError
from ratchet.store.store import Store
from ratchet.trainer.observability.progress import Standing

log = logging.getLogger(__name__)

EVERY = 3.0  # seconds between two writes of one work


class StoredProgress:
    """A watcher of an alias's progress that notes it in the store."""

    def __init__(
        self, store: Store, alias: str, every: float = EVERY, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._alias = alias
        self._every = every
        self._clock = clock
        self._due: dict[str, float] = {}

    def __call__(self, standing: Standing) -> None:
        """See a standing."""
        now = self._clock()
        if now < self._due.get(standing.work, 0.0) and not standing.ended:
            return
        self._due[standing.work] = 0.0 if standing.ended else now + self._every
        try:
            self._store.job_progress.update(
                self._alias, standing.work, done=standing.done, total=standing.total, seconds=standing.seconds,
                means=standing.means, ended=standing.ended,
            )  # fmt: skip
        except StoreError as error:
            log.warning("event=standing_not_noted work=%s reason=%r", standing.work, str(error))
