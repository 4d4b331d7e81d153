"""Reports every call to metrics, call log and tracing: when it begins, and once after its last byte.

Promise: a failure in here never fails a call.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from ratchet.proxy.errors import ContextOverflow, UpstreamError
from ratchet.proxy.telemetry.call_telemetry import CallCounters, CallTiming, log_call
from ratchet.proxy.telemetry.metrics import ProxyMetrics
from ratchet.proxy.worker.call.active_call import ActiveCall, CallPhase
from ratchet.proxy.worker.call.tracing import CallSpans
from ratchet.proxy.worker.http.request_identity import trace_headers

log = logging.getLogger("ratchet.proxy")


class CallObserver:
    """Counts calls; logs them if `logs_calls`; traces them if there are `spans`."""

    def __init__(self, metrics: ProxyMetrics, spans: CallSpans | None = None, *, logs_calls: bool = False) -> None:
        self._metrics = metrics
        self._counters = CallCounters(metrics)
        self._logs_calls = logs_calls
        self._spans = spans

    def call_started(self, call: ActiveCall, headers: Mapping[bytes, bytes]) -> dict[str, str]:
        """Report the beginning of a call; return the tracing headers for vLLM."""
        self._metrics.open_calls += 1
        if self._spans is not None:
            try:
                return self._spans.start_span(call, headers)
            except Exception as error:  # the call goes on without a span
                log.exception("event=observation_failed call=%s reason=%r", call.start.call_id, str(error))
        return trace_headers(headers)

    def upstream_failed(self, label: str) -> None:
        """Count a failure of an upstream."""
        self._metrics.upstream_errors.labels(label).inc()

    def fell_back(self, call: ActiveCall, model: str, error: UpstreamError) -> None:
        """Report that another model is asked after the failure of a call."""
        reason = "context_length" if isinstance(error, ContextOverflow) else "outage"
        self._metrics.fallbacks.labels(call.start.alias, model, reason).inc()
        log.warning("event=fallback call=%s model=%s reason=%r", call.start.call_id, model, str(error))

    def call_ended(self, call: ActiveCall) -> None:
        """Report the end of a recorded call; does nothing if it was reported."""
        if call.phase is CallPhase.REPORTED:
            return
        call.enter(CallPhase.REPORTED)
        self._metrics.open_calls -= 1
        try:
            self._report(call)
        except Exception as error:  # the client has its response; only the report is lost
            log.exception("event=observation_failed call=%s reason=%r", call.start.call_id, str(error))

    def _report(self, call: ActiveCall) -> None:
        record, timing = call.open_call.ended, None
        if record is not None:  # otherwise it is counted as a lost record
            timing = CallTiming.of(record, time.perf_counter() - call.arrived, call.overhead_at_send)
            self._counters.count(record, timing, call.failure)
            if self._logs_calls:
                name = call.request_id.decode()
                own = name if name != record.start.call_id else None  # the client's
                log_call(record, timing, call.failure, call.client, own)
        if self._spans is not None:
            self._spans.end_span(call, record, timing)
