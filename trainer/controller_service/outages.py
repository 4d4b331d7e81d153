"""Outages: errors that waiting may fix, and the alarm of one that lasts.

A step or a piece of work that meets one is tried again after a pause. A short outage is a line in the log; one that
lasts is the alarm `outage`, which names what does not answer and clears when the agent's work goes on.
"""

from __future__ import annotations

import logging
from contextlib import suppress

from ratchet.store.errors import StoreUnavailable
from ratchet.store.store import Store
from ratchet.trainer.errors import AdapterStoreUnreachable, EngineUnreachable, LearnerUnreachable

log = logging.getLogger(__name__)

OUTAGES = (StoreUnavailable, EngineUnreachable, LearnerUnreachable, AdapterStoreUnreachable)
OUTAGE_PAUSE_SECONDS = 2.0
ALARM = "outage"
_ALARM_SECONDS = 15.0
_LEARNER_SECONDS = 600.0  # a large base model takes minutes to load


class OutageAlarm:
    """The alarm of one agent. Times are Unix seconds."""

    def __init__(self, store: Store, alias: str) -> None:
        self._store = store
        self._alias = alias
        self._since: float | None = None
        self._may_be_raised = True  # by an earlier trainer

    def record(self, outage: Exception, now: float, work: str = "") -> None:
        """Log an outage, and raise the alarm once it has lasted."""
        log.warning("event=outage alias=%s work=%r reason=%r", self._alias, work, str(outage))
        first = self._since is None
        self._since = now if self._since is None else self._since
        limit = _LEARNER_SECONDS if isinstance(outage, LearnerUnreachable) else _ALARM_SECONDS
        if first or now - self._since < limit or isinstance(outage, StoreUnavailable):
            return
        with suppress(StoreUnavailable):
            self._store.alarms.raise_(
                f"{ALARM}:{self._alias}",
                f"training of {self._alias} waits, and is tried again every {OUTAGE_PAUSE_SECONDS:g} s: {outage}",
            )
            self._may_be_raised = True

    def end(self) -> None:
        """Record that the work goes on."""
        self._since = None
        if self._may_be_raised:
            self._store.alarms.clear(f"{ALARM}:{self._alias}")
            self._may_be_raised = False
