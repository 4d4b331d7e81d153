"""Told of every call's end, once, after its last byte: counts and logs it.

Promise: whatever goes wrong here never fails a call.
"""

from __future__ import annotations

import logging
import time

from proxy.exchange import Exchange
from proxy.observing.call_counts import CallCounts
from proxy.observing.call_log import CallLog
from proxy.observing.metrics import Metrics
from proxy.observing.timing import Timing

log = logging.getLogger("ratchet.proxy")


class Observer:
    """The one who is told. Without a call log no line is written."""

    def __init__(self, metrics: Metrics, call_log: CallLog | None) -> None:
        self._counts = CallCounts(metrics)
        self._log = call_log

    def ended(self, exchange: Exchange) -> None:
        """Take note of a call's end; telling it again changes nothing."""
        record = exchange.opened.ended
        if exchange.told or record is None:  # what could not be recorded is counted as lost
            return
        exchange.told = True
        timing = Timing.of(record, time.perf_counter() - exchange.arrived, exchange.spent)
        try:
            self._counts.count(record, timing, exchange.failure)
            if self._log is not None:
                self._log.note(record, timing, exchange.failure)
        except Exception as error:  # the client has its answer; only what is told about it is at stake
            log.exception("event=observation_failed call=%s reason=%r", record.begun.call_id, str(error))
