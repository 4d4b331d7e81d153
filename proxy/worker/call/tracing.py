"""One OpenTelemetry span per call, with the GenAI attributes. Off unless configured and installed.

A span has the kind CLIENT: it is the proxy's call to the model. Its parent is the client's `traceparent`; vLLM gets
the span's own. It contains names, numbers and times, never content or keys.

Promises: without a collector's address, OpenTelemetry is not imported. A slow or dead collector delays no call; it
costs a bounded queue of spans and up to `_STOP_TIMEOUT` seconds at the stop. The standard `OTEL_*` variables configure
the rest (service name, sampler, headers, batches); the protocol is OTLP over HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ratchet.proxy.errors import ProxyError
from ratchet.proxy.telemetry.call_telemetry import CallTiming
from ratchet.proxy.worker.http.request_identity import trace_headers
from ratchet.store.errors import install_hint
from ratchet.store.records import OTHER, CallEnded

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

    from ratchet.proxy.worker.call.active_call import ActiveCall

log = logging.getLogger("ratchet.proxy")

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PATH = "/v1/traces"
_STOP_TIMEOUT = 2.0  # seconds to send the remaining spans
_NUMBERS = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "seed": "gen_ai.request.seed",
    "n": "gen_ai.request.choice.count",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
}

_Attributes = dict[str, Any]


class CallSpans:
    """Starts and ends the spans."""

    def __init__(self, provider: TracerProvider, exporter: SpanExporter | None = None) -> None:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._exporter = exporter
        self._tracer = provider.get_tracer("ratchet.proxy")
        self._propagator = TraceContextTextMapPropagator()
        self._kind = SpanKind.CLIENT

    async def start(self) -> None:
        """Nothing to start: the first span starts the exporter."""

    async def stop(self) -> None:
        """Send the remaining spans, within a timeout."""
        ending = threading.Thread(target=self._provider.shutdown, name="spans-end", daemon=True)
        ending.start()
        await asyncio.to_thread(ending.join, _STOP_TIMEOUT)
        if ending.is_alive() and self._exporter is not None:
            self._exporter.shutdown()  # ends its retries
            log.warning("event=spans_not_sent reason='the collector does not respond'")

    def start_span(self, call: ActiveCall, headers: Mapping[bytes, bytes]) -> dict[str, str]:
        """Start a call's span; return the trace headers for vLLM."""
        start = call.start
        operation = "text_completion" if start.dialect == "completions" else "chat"
        arrived = time.time_ns() - int((time.perf_counter() - call.arrived) * 1e9)
        given = trace_headers(headers)
        span = self._tracer.start_span(
            f"{operation} {start.alias}",
            context=self._propagator.extract(given) if given else None,
            kind=self._kind,
            start_time=arrived,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "openai" if start.purpose == OTHER else "vllm",
                "gen_ai.request.model": call.request.model,
            },
        )
        call.span = span
        sent: dict[str, str] = {}
        self._propagator.inject(sent, context=_context(span))
        return sent

    def end_span(self, call: ActiveCall, record: CallEnded | None, timing: CallTiming | None) -> None:
        """End a call's span with the attributes of its end."""
        span: Span | None = call.span
        if span is None:
            return
        call.span = None
        if span.is_recording() and record is not None and timing is not None:
            span.set_attributes(_attributes(record, timing, call.capture.response_id))
        if call.failure:
            span.set_attribute("error.type", call.failure)
            span.set_status(_error_status())
        span.end()


def make_spans(endpoint: str | None, environ: Mapping[str, str]) -> CallSpans | None:
    """Return the spans if the setting or the environment enables them, else None.

    Raises ProxyError if the setting enables them and OpenTelemetry is not installed. If only the environment does,
    that is a warning: its variables are often set for all programs of a machine.
    """
    address = endpoint or next((environ[name] for name in _ENDPOINTS if environ.get(name)), None)
    disabled = environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if not address or disabled or "otlp" not in environ.get("OTEL_TRACES_EXPORTER", "otlp"):
        return None
    try:
        return _make_exporting_spans(endpoint, environ)
    except ModuleNotFoundError as error:
        remedy = install_hint("otel")
        if endpoint:
            raise ProxyError(f"otlp_endpoint is set, {error.name} is not installed: {remedy}, or unset it") from error
        log.warning("event=no_spans reason='%s is not installed: %s'", error.name, remedy)
        return None


def _make_exporting_spans(endpoint: str | None, environ: Mapping[str, str]) -> CallSpans:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = environ.get("OTEL_SERVICE_NAME") or "service.name=" in environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    resource = Resource.create({} if named else {"service.name": "ratchet-proxy"})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/").removesuffix(_PATH) + _PATH if endpoint else None)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return CallSpans(provider, exporter)


def _context(span: Span) -> Any:
    from opentelemetry.trace import set_span_in_context

    return set_span_in_context(span)


def _error_status() -> Any:
    from opentelemetry.trace import StatusCode

    return StatusCode.ERROR


def _attributes(record: CallEnded, timing: CallTiming, response_id: str | None) -> _Attributes:
    start = record.start
    attributes: _Attributes = {
        "gen_ai.conversation.id": start.trajectory_id,
        "gen_ai.response.model": start.policy,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "http.response.status_code": record.status,
        "ratchet.call.id": start.call_id,
        "ratchet.call.state": str(record.state),
        "ratchet.call.context": record.context,
        "ratchet.linked_by": start.linked_by,
        "ratchet.dialect": start.dialect,
    }
    attributes |= _numbers(start.sampling.items())
    if reasons := [choice.finish_reason for choice in record.choices if choice.finish_reason]:
        attributes["gen_ai.response.finish_reasons"] = reasons
    if response_id:
        attributes["gen_ai.response.id"] = response_id
    if start.streamed:
        attributes["gen_ai.request.stream"] = True
        if timing.first_byte is not None:
            attributes["gen_ai.response.time_to_first_chunk"] = timing.first_byte
    if record.upstream:
        address = urlsplit(record.upstream)
        attributes["server.address"] = address.hostname or ""
        attributes["server.port"] = address.port or (443 if address.scheme == "https" else 80)
    return attributes


def _numbers(sampling: Iterable[tuple[str, Any]]) -> _Attributes:
    """Return the numeric sampling parameters."""
    return {
        _NUMBERS[name]: value
        for name, value in sampling
        if name in _NUMBERS and isinstance(value, (int, float)) and not isinstance(value, bool)
    }
