"""Outages: errors that waiting may fix, and the alarm of one that lasts.

A step or a piece of work that meets one is tried again after a pause. An outage is a line in the log at its begin, once
a minute and at its end; one that lasts is the alarm `outage`, which names what does not answer and clears when the
agent's work goes on.
"""

from __future__ import annotations

import logging
import time
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
_LOG_SECONDS = 60.0


class OutageLog:
    """Logs the outages of one agent, or of the store for all agents. Times are Unix seconds."""

    def __init__(self, alias: str = "") -> None:
        self._alias = alias
        self._began_at: float | None = None
        self._logged_at: dict[str, float] = {}  # by work

    def record(self, outage: Exception, now: float, work: str = "") -> float:
        """Log an outage, unless that was done within the last minute; return the seconds that it has lasted."""
        self._began_at = now if self._began_at is None else self._began_at
        if now - self._logged_at.get(work, -_LOG_SECONDS) >= _LOG_SECONDS:
            self._logged_at[work] = now
            log.warning("event=outage alias=%s work=%r reason=%r", self._alias, work, str(outage))
        return now - self._began_at

    def end(self, now: float) -> None:
        if self._began_at is not None:
            log.info("event=outage_ended alias=%s seconds=%.0f", self._alias, now - self._began_at)
            self._began_at, self._logged_at = None, {}


class OutageAlarm:
    """The alarm of one agent. Times are Unix seconds."""

    def __init__(self, store: Store, alias: str) -> None:
        self._store = store
        self._alias = alias
        self._log = OutageLog(alias)
        self._may_be_raised = True  # by an earlier trainer

    def record(self, outage: Exception, now: float, work: str = "") -> None:
        """Log an outage, and raise the alarm once it has lasted."""
        lasted = self._log.record(outage, now, work)
        limit = _LEARNER_SECONDS if isinstance(outage, LearnerUnreachable) else _ALARM_SECONDS
        if lasted < limit or isinstance(outage, StoreUnavailable):
            return
        with suppress(StoreUnavailable):
            self._store.alarms.raise_(
                f"{ALARM}:{self._alias}",
                f"training of {self._alias} waits, and is tried again every {OUTAGE_PAUSE_SECONDS:g} s: {outage}",
            )
            self._may_be_raised = True

    def end(self) -> None:
        """Record that the work goes on."""
        self._log.end(time.time())
        if self._may_be_raised:
            self._store.alarms.clear(f"{ALARM}:{self._alias}")
            self._may_be_raised = False
