"""Spans: their attributes, their parents, and that no collector delays a call."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from starlette.types import Receive, Scope, Send

from ratchet.proxy.errors import ProxyError
from ratchet.proxy.worker.call.tracing import make_spans
from ratchet.store.store import Store
from tests.harness.proxy.running_proxy import Start, chat_body, running
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import eventually, served

CALL = "/v1/chat/completions"
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
SECRET = "a-secret"


class Collector:
    """An OTLP/HTTP collector that stores what it receives."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.services: set[str] = set()
        self.spans: list[Any] = []
        self.raw = b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for kind in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{kind}.complete"})
            return
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.paths.append(scope["path"])
        self.raw += body
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            named = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
            self.services.add(named.get("service.name", ""))
            for scoped in resource.scope_spans:
                self.spans += scoped.spans
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Collector, str]]:
    """A running collector and its URL."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    app = Collector()
    with served(app) as url:
        yield app, url


class Traced:
    """The scripted vLLM, with the `traceparent` of every request."""

    def __init__(self, vllm: ScriptedVllm) -> None:
        self.traces: list[str] = []
        self._vllm = vllm

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self.traces.append(dict(scope["headers"]).get(b"traceparent", b"").decode())
        await self._vllm(scope, receive, send)


@pytest.fixture
def traced(vllm: ScriptedVllm) -> Iterator[tuple[Traced, str]]:
    """A running vLLM that records trace headers, and its URL."""
    app = Traced(vllm)
    with served(app) as url:
        yield app, url


def attributes(span: Any) -> dict[str, Any]:
    """A span's attributes as plain values."""
    return {pair.key: _plain(pair.value) for pair in span.attributes}


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [_plain(one) for one in found.values] if kind == "array_value" else found


def test_a_call_is_one_span_with_the_genai_attributes(
    collector: tuple[Collector, str], start: Start, traced: tuple[Traced, str]
) -> None:
    proxy = start(otlp_endpoint=collector[1], upstreams=(traced[1],))
    body = chat_body("#tokens=5", stream=True, temperature=0.5, max_tokens=9, seed=3, top_p="odd", user=SECRET)
    headers = {"traceparent": PARENT, "x-ratchet-trajectory": "job", "authorization": f"Bearer {SECRET}"}
    call_id = proxy.http.post(CALL, json=body, headers=headers).headers["x-ratchet-call"]
    [span] = eventually(lambda: collector[0].spans)
    assert (span.name, span.kind) == ("chat agent", 3), "a client's span"
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == tuple(PARENT.split("-")[1:3])
    assert f"00-{span.trace_id.hex()}-{span.span_id.hex()}-01" in traced[0].traces, "vLLM's spans hang below it"
    assert 0 < span.end_time_unix_nano - span.start_time_unix_nano < 20e9
    values = attributes(span)
    assert values["gen_ai.response.id"].startswith("chatcmpl-")
    assert 0 < values.pop("gen_ai.response.time_to_first_chunk") < 20
    assert (values.pop("server.address"), values.pop("server.port") > 0) == ("127.0.0.1", True)
    assert values == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "agent",
        "gen_ai.response.model": "agent@0",
        "gen_ai.conversation.id": "job",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.seed": 3,
        "gen_ai.request.stream": True,
        "gen_ai.usage.input_tokens": values["gen_ai.usage.input_tokens"],
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.response.id": values["gen_ai.response.id"],
        "gen_ai.response.finish_reasons": ["stop"],
        "http.response.status_code": 200,
        "ratchet.call.id": call_id,
        "ratchet.call.state": "answered",
        "ratchet.call.context": "root",
        "ratchet.linked_by": "header",
        "ratchet.dialect": "chat",
    }
    assert collector[0].services == {"ratchet-proxy"}
    assert set(collector[0].paths) == {"/v1/traces"}
    assert SECRET.encode() not in collector[0].raw


def test_a_failed_call_is_a_failed_span(collector: tuple[Collector, str], start: Start) -> None:
    proxy = start(otlp_endpoint=collector[1])
    proxy.http.post(CALL, json=chat_body("#status=500"))
    proxy.http.post("/v1/completions", json={"model": "agent", "prompt": "#tokens=9 #cut=3", "stream": True})
    spans = eventually(lambda: len(collector[0].spans) == 2 and collector[0].spans)
    assert [span.status.code for span in spans] == [2, 2]
    assert [attributes(span)["error.type"] for span in spans] == ["status_5xx", "upstream_disconnected"]
    assert spans[1].name == "text_completion agent"


def test_the_standard_variables_configure_it(
    collector: tuple[Collector, str], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector[1])
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-proxy")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    proxy = start()
    proxy.http.post(CALL, json=chat_body("hi"))
    proxy.http.post(CALL, json=chat_body("hi"), headers={"traceparent": PARENT})
    eventually(lambda: collector[0].spans)
    assert [span.trace_id.hex() for span in collector[0].spans] == [PARENT.split("-")[1]], "the other is not sampled"
    assert collector[0].services == {"my-proxy"}


def test_remaining_spans_are_sent_at_the_stop(
    collector: tuple[Collector, str], vllm_url: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    with running(vllm_url, store, tmp_path, otlp_endpoint=collector[1]) as proxy:
        proxy.http.post(CALL, json=chat_body("hi"))
        assert collector[0].spans == []
    assert len(collector[0].spans) == 1


@pytest.mark.slow
def test_a_dead_collector_costs_no_call_and_little_at_the_stop(
    vllm_url: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "10")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "5")
    with socket.socket() as silent:  # accepts connections and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        dead = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with running(vllm_url, store, tmp_path, otlp_endpoint=dead) as proxy:
            for _ in range(40):
                assert proxy.http.post(CALL, json=chat_body("hi"), timeout=5).status_code == 200
            proxy.settled()
            ended_at = time.monotonic()
        assert time.monotonic() - ended_at < 9


def test_a_setting_without_the_package_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)  # as if it were not installed
    with pytest.raises(ProxyError, match=r"otlp_endpoint .* pip install '\.\[otel\]'"):
        make_spans("http://x", {})
    assert make_spans(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}) is None


@pytest.mark.parametrize(
    "environ",
    [{}, {"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "true"},
     {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_TRACES_EXPORTER": "none"}],
)  # fmt: skip
def test_tracing_is_off_by_default(environ: Mapping[str, str]) -> None:
    assert make_spans(None, environ) is None


def test_without_tracing_the_clients_trace_header_is_passed_on(start: Start, traced: tuple[Traced, str]) -> None:
    proxy = start(upstreams=(traced[1],))
    proxy.http.post(CALL, json=chat_body("hi"), headers={"traceparent": PARENT})
    assert PARENT in traced[0].traces
