"""Told of every call: at its beginning, and once after its last byte. Counts, logs and traces it.

Promise: whatever goes wrong here never fails a call.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from ratchet.proxy.telemetry.call_telemetry import CallCounters, CallTiming, log_call
from ratchet.proxy.telemetry.metrics import Metrics
from ratchet.proxy.worker.call.active_call import ActiveCall
from ratchet.proxy.worker.call.tracing import CallSpans
from ratchet.proxy.worker.http import request_identity

log = logging.getLogger("ratchet.proxy")


class CallObserver:
    """The one who is told. A line is written where `logs_calls` says so, a span made where there are spans."""

    def __init__(self, metrics: Metrics, spans: CallSpans | None = None, *, logs_calls: bool = False) -> None:
        self._counts = CallCounters(metrics)
        self._logs_calls = logs_calls
        self._spans = spans

    def begun(self, exchange: ActiveCall, headers: Mapping[bytes, bytes]) -> dict[str, str]:
        """Take note of a call's beginning; return the tracing headers that go on to vLLM."""
        if self._spans is not None:
            try:
                return self._spans.begin(exchange, headers)
            except Exception as error:  # a call without a span is a call
                log.exception("event=observation_failed call=%s reason=%r", exchange.opened.begun.call_id, str(error))
        return request_identity.trace(headers)

    def ended(self, exchange: ActiveCall) -> None:
        """Take note of a call's end; telling it again changes nothing."""
        if exchange.told:
            return
        exchange.told = True
        try:
            self._note(exchange)
        except Exception as error:  # the client has its answer; only what is told about it is at stake
            log.exception("event=observation_failed call=%s reason=%r", exchange.opened.begun.call_id, str(error))

    def _note(self, exchange: ActiveCall) -> None:
        record, timing = exchange.opened.ended, None
        if record is not None:  # what could not be recorded is counted as lost
            timing = CallTiming.of(record, time.perf_counter() - exchange.arrived, exchange.spent)
            self._counts.count(record, timing, exchange.failure)
            if self._logs_calls:
                log_call(record, timing, exchange.failure)
        if self._spans is not None:
            self._spans.end(exchange, record, timing)
