"""One call in the making: what was asked, where it belongs, what has come of it so far. Holds; decides nothing."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.types import Message

from ratchet.proxy.dialects.dialect import ResponseEncoder
from ratchet.proxy.messages.link_records import AttemptKey
from ratchet.proxy.wire.asgi import JSON, Headers
from ratchet.proxy.wire.capture import Capture
from ratchet.proxy.wire.request_body import ChatRequest
from ratchet.proxy.worker.call.recorder import OpenCall

SSE = (b"content-type", b"text/event-stream; charset=utf-8")


class ActiveCall(msgspec.Struct):
    """The state of one call. `arrived` and `upstream_seconds` are on the monotonic clock."""

    request: ChatRequest  # as it goes to vLLM; what the client said is in `opened`
    opened: OpenCall
    voice: ResponseEncoder
    request_id: bytes
    attempt: AttemptKey  # what a retry repeats
    arrived: float
    upstream_seconds: float = 0.0
    waiting_since: float | None = None  # for the upstream
    url: str | None = None
    started: bool = False  # the client has the response's head
    over: bool = False  # its end is recorded
    first_byte_at: float | None = None
    spent: float | None = None  # the overhead when the answer, or its head, was ready to be sent
    failure: str | None = None  # class of the error that it ended with
    span: Any = None  # OpenTelemetry's, where calls are traced
    told: bool = False  # its end was told to the observer

    @property
    def capture(self) -> Capture:
        """What the answer says so far."""
        return self.voice.capture

    @property
    def policy(self) -> str:
        """What answers: `alias@version`, or another model's name."""
        return self.opened.begun.policy

    def overhead(self) -> float:
        """Return the seconds so far that were not spent waiting for the upstream."""
        now = time.perf_counter()
        waiting = 0.0 if self.waiting_since is None else now - self.waiting_since
        return max(0.0, now - self.arrived - self.upstream_seconds - waiting)

    def waited(self) -> None:
        """The upstream has answered, or failed."""
        if self.waiting_since is not None:
            self.upstream_seconds += time.perf_counter() - self.waiting_since
            self.waiting_since = None

    def begin(self) -> None:
        """The client has the response's head."""
        self.started = True

    def head(self) -> Message | None:
        """Return a stream's head, unless it has been sent."""
        if self.started:
            return None
        return {"type": "http.response.start", "status": 200, "headers": self.headers(streamed=True)}

    def headers(self, *, streamed: bool = False) -> Headers:
        """Return the response headers that every captured call has."""
        begun = self.opened.begun
        return [
            SSE if streamed else JSON,
            (b"x-request-id", self.request_id),
            *(((b"request-id", self.request_id),) if begun.dialect == "messages" else ()),  # Anthropic's name
            (b"x-ratchet-call", begun.call_id.encode()),
            (b"x-ratchet-trajectory", begun.trajectory_id.encode()),
            (b"x-ratchet-policy", self.policy.encode()),
            (b"x-ratchet-overhead-ms", b"%.3f" % (self.overhead() * 1000)),
        ]
