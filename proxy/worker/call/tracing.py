"""One OpenTelemetry span per call, with the GenAI attributes; off unless it is asked for and installed.

A span is of the kind CLIENT: it stands for the proxy's call to the model. Its parent is the client's `traceparent`,
and what goes on to vLLM is the span's own. It says names, numbers and times, never content and never a key.

Promises: without a collector's address nothing of OpenTelemetry is imported; a collector that is slow or dead delays
no call, it costs a bounded queue of spans and a few seconds at the stop. The standard `OTEL_*` variables configure the
rest (service name, sampler, headers, batches); the protocol is OTLP over HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ratchet.install_hint import install_hint
from ratchet.proxy.errors import StartError
from ratchet.proxy.telemetry.call_telemetry import CallTiming
from ratchet.proxy.worker.http import request_identity
from ratchet.store.records import OTHER, CallEnded

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

    from ratchet.proxy.worker.call.active_call import ActiveCall

log = logging.getLogger("ratchet.proxy")

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PATH = "/v1/traces"
_PATIENCE = 2.0  # seconds at the stop for what is left to be sent
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
    """Begins and ends the spans. A provider is OpenTelemetry's; an exporter is told to give up at the stop."""

    def __init__(self, provider: TracerProvider, exporter: SpanExporter | None = None) -> None:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._exporter = exporter
        self._tracer = provider.get_tracer("ratchet.proxy")
        self._propagator = TraceContextTextMapPropagator()
        self._kind = SpanKind.CLIENT

    async def start(self) -> None:
        """Nothing to start: the first span does."""

    async def stop(self) -> None:
        """Send what is left, if the collector takes it at once."""
        ending = threading.Thread(target=self._provider.shutdown, name="spans-end", daemon=True)
        ending.start()
        await asyncio.to_thread(ending.join, _PATIENCE)
        if ending.is_alive() and self._exporter is not None:
            self._exporter.shutdown()  # ends its tries
            log.warning("event=spans_not_sent reason='the collector does not answer'")

    def begin(self, exchange: ActiveCall, headers: Mapping[bytes, bytes]) -> dict[str, str]:
        """Begin a call's span; return the tracing headers for vLLM."""
        begun = exchange.opened.begun
        operation = "text_completion" if begun.dialect == "completions" else "chat"
        arrived = time.time_ns() - int((time.perf_counter() - exchange.arrived) * 1e9)
        given = request_identity.trace(headers)
        span = self._tracer.start_span(
            f"{operation} {begun.alias}",
            context=self._propagator.extract(given) if given else None,
            kind=self._kind,
            start_time=arrived,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "openai" if begun.purpose == OTHER else "vllm",
                "gen_ai.request.model": exchange.request.model,
            },
        )
        exchange.span = span
        sent: dict[str, str] = {}
        self._propagator.inject(sent, context=_context(span))
        return sent

    def end(self, exchange: ActiveCall, record: CallEnded | None, timing: CallTiming | None) -> None:
        """End a call's span with all that is known by then."""
        span: Span | None = exchange.span
        if span is None:
            return
        exchange.span = None
        if span.is_recording() and record is not None and timing is not None:
            span.set_attributes(_told(record, timing, exchange.capture.response_id))
        if exchange.failure:
            span.set_attribute("error.type", exchange.failure)
            span.set_status(_failed())
        span.end()


def make_spans(endpoint: str | None, environ: Mapping[str, str]) -> CallSpans | None:
    """Return the spans that the setting or the variables ask for, or None.

    Raises StartError where the setting asks for them and OpenTelemetry is not installed; variables alone are not
    an error then, since they are often set for all programs of a machine.
    """
    wanted = endpoint or next((environ[name] for name in _ENDPOINTS if environ.get(name)), None)
    disabled = environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if not wanted or disabled or "otlp" not in environ.get("OTEL_TRACES_EXPORTER", "otlp"):
        return None
    try:
        return _exported(endpoint, environ)
    except ModuleNotFoundError as error:
        remedy = install_hint("otel")
        if endpoint:
            raise StartError(f"otlp_endpoint is set, {error.name} is not installed: {remedy}, or unset it") from error
        log.warning("event=no_spans reason='%s is not installed: %s'", error.name, remedy)
        return None


def _exported(endpoint: str | None, environ: Mapping[str, str]) -> CallSpans:
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


def _failed() -> Any:
    from opentelemetry.trace import StatusCode

    return StatusCode.ERROR


def _told(record: CallEnded, timing: CallTiming, response_id: str | None) -> _Attributes:
    begun = record.begun
    told: _Attributes = {
        "gen_ai.conversation.id": begun.trajectory_id,
        "gen_ai.response.model": begun.policy,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "http.response.status_code": record.status,
        "ratchet.call.id": begun.call_id,
        "ratchet.call.state": str(record.state),
        "ratchet.call.context": record.context,
        "ratchet.linked_by": begun.linked_by,
        "ratchet.dialect": begun.dialect,
    }
    told |= _numbers(begun.sampling.items())
    if reasons := [choice.finish_reason for choice in record.choices if choice.finish_reason]:
        told["gen_ai.response.finish_reasons"] = reasons
    if response_id:
        told["gen_ai.response.id"] = response_id
    if begun.streamed:
        told["gen_ai.request.stream"] = True
        if timing.first_byte is not None:
            told["gen_ai.response.time_to_first_chunk"] = timing.first_byte
    if record.upstream:
        address = urlsplit(record.upstream)
        told["server.address"] = address.hostname or ""
        told["server.port"] = address.port or (443 if address.scheme == "https" else 80)
    return told


def _numbers(sampling: Iterable[tuple[str, Any]]) -> _Attributes:
    """Return the sampling parameters that are numbers, as they should be."""
    return {
        _NUMBERS[name]: value
        for name, value in sampling
        if name in _NUMBERS and isinstance(value, (int, float)) and not isinstance(value, bool)
    }
