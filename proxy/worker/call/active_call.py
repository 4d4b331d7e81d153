"""One captured call from its begin record to its end: a state machine.

    phase      meaning                                        next
    ---------  ---------------------------------------------  -------------------
    OPEN       the begin record is in the journal             HEAD_SENT, RECORDED
    HEAD_SENT  the client has the head of a stream (200)      RECORDED
    RECORDED   the end record was passed to the journal       REPORTED
    REPORTED   metrics, log line and span have the end        -

A call is recorded exactly once, with one `CallOutcome`: how it ended, by what the engine said of the answer. Linking,
the store (`cut_off`) and retries read its state. The HTTP status that went out is recorded for people only: once the
head of a stream is out, it says nothing about the answer.

    outcome              state     error label          cause
    -------------------  --------  -------------------  ---------------------------------------------
    outcome_of           answered  -                    a complete response
    outcome_of           failed    stream_error         vLLM sent an error event in its stream
    outcome_of           failed    the error's class    vLLM did not complete its answer
    refused              refused   status_4xx           vLLM refused the request
    refused              failed    status_4xx, _5xx     vLLM failed, or the request may succeed later
    upstream_failed      failed    the error's class    no complete response from vLLM
    fell_back            failed    the error's class    the same, and another model answers
    CLIENT_DISCONNECTED  aborted   client_disconnected  the client closed its connection
    SHUTTING_DOWN        failed    shutting_down        the proxy stopped
    INTERNAL_FAILURE     failed    internal_error       a bug in the proxy

After an aborted or a failed call, and if a recorded answer could not be sent, linking expects a retry.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple

import msgspec
from starlette.types import Message

from ratchet.proxy.dialects.dialect import ResponseEncoder
from ratchet.proxy.errors import UpstreamError
from ratchet.proxy.messages.link_records import Placement
from ratchet.proxy.telemetry.metrics import INTERNAL_ERROR, error_label
from ratchet.proxy.wire.asgi import JSON, Headers
from ratchet.proxy.wire.capture import Capture
from ratchet.proxy.wire.request_body import ChatRequest
from ratchet.proxy.worker.call.fallbacks import NO_FALLBACKS, Fallbacks
from ratchet.store.records import CallEnded, CallStarted
from ratchet.store.states import UNANSWERED, CallState

SSE = (b"content-type", b"text/event-stream; charset=utf-8")

_RETRIED = (408, 409, 429)  # and every 5xx: statuses that the SDKs retry


class CallPhase(Enum):
    """How far a call is."""

    OPEN = 0
    HEAD_SENT = 1
    RECORDED = 2
    REPORTED = 3


_NEXT = {
    CallPhase.OPEN: (CallPhase.HEAD_SENT, CallPhase.RECORDED),
    CallPhase.HEAD_SENT: (CallPhase.RECORDED,),
    CallPhase.RECORDED: (CallPhase.REPORTED,),
    CallPhase.REPORTED: (),
}


class CallOutcome(NamedTuple):
    """How a call ended; `failure` is its error label in the metrics, `error` the message in its record."""

    state: CallState
    failure: str | None = None
    error: str | None = None
    falls_back: bool = False  # another model answers

    @property
    def is_retryable(self) -> bool:
        """Whether its client may send the same request again."""
        return self.state in UNANSWERED and not self.falls_back


ANSWERED = CallOutcome(CallState.ANSWERED)
CLIENT_DISCONNECTED = CallOutcome(CallState.ABORTED, "client_disconnected", "the client disconnected")
SHUTTING_DOWN = CallOutcome(CallState.FAILED, "shutting_down", "the proxy was stopped")
INTERNAL_FAILURE = CallOutcome(CallState.FAILED, INTERNAL_ERROR, "the proxy failed")


def outcome_of(capture: Capture) -> CallOutcome:
    """Return the outcome of a call whose response has ended."""
    cut = capture.cut()
    if cut is None:
        return ANSWERED
    if capture.error is None:
        return upstream_failed(cut)
    # Once the engine has sampled, it is the engine that failed, whatever status its error states.
    state = CallState.FAILED if capture.has_started else _state_of(cut.status)
    return CallOutcome(state, "stream_error", str(cut))


def refused(status: int, message: str) -> CallOutcome:
    """Return the outcome of a call that vLLM answered with an error."""
    return CallOutcome(_state_of(status), f"status_{status // 100}xx", message)


def upstream_failed(error: UpstreamError) -> CallOutcome:
    """Return the outcome of a call without a complete response."""
    return CallOutcome(_state_of(error.status), error_label(error), str(error))


def fell_back(error: UpstreamError) -> CallOutcome:
    """Return the outcome of a call that another model answers: the client has no reason to repeat it."""
    return upstream_failed(error)._replace(falls_back=True)


def _state_of(status: int) -> CallState:
    """Return the state after an error of this status: refused, unless the same request may succeed later."""
    return CallState.FAILED if status >= 500 or status in _RETRIED else CallState.REFUSED


class OpenCall(msgspec.Struct):
    """The recorder's part of a call: its begin record, and what its end record needs from the request."""

    start: CallStarted  # without messages and tools
    placement: Placement
    keys: tuple[str, ...]  # link keys of the prompt's messages; empty if nothing can continue the call
    messages: Sequence[dict[str, Any]]  # the prompt
    may_contain: Callable[[str], bool]  # False: no message of the prompt contains the text
    untrainable: str | None
    first_turn: str  # hash of the prompt up to its first message that is not the system's, as recorded
    redacted: bool = False  # some of the request's content was redacted
    ended: CallEnded | None = None  # the end record
    new: Sequence[str] = ()  # hashes of the messages and tools in the begin record
    losses: tuple[int, int] = (0, 0)  # of the recorder when the call began


class ActiveCall(msgspec.Struct):
    """The state of one call. `arrived` and `upstream_seconds` are on the monotonic clock."""

    request: ChatRequest  # as sent to vLLM; the client's own request is in `open_call`
    open_call: OpenCall
    encoder: ResponseEncoder
    request_id: bytes
    arrived: float
    client: str | None = None  # its address
    fallbacks: Fallbacks = NO_FALLBACKS
    failed_model: str | None = None  # that this call's model answers for
    phase: CallPhase = CallPhase.OPEN
    failure: str | None = None  # error label of its outcome
    upstream_seconds: float = 0.0
    waiting_since: float | None = None  # for the upstream
    url: str | None = None
    first_byte_at: float | None = None
    overhead_at_send: float | None = None  # when the response, or its head, was ready to be sent
    span: Any = None  # OpenTelemetry's, if calls are traced

    @property
    def start(self) -> CallStarted:
        """The begin record."""
        return self.open_call.start

    @property
    def capture(self) -> Capture:
        """What the response contains so far."""
        return self.encoder.capture

    @property
    def policy(self) -> str:
        """`alias@version`, or another model's name."""
        return self.open_call.start.policy

    @property
    def prefix(self) -> str:
        """Names what a prefix cache shares between trajectories: version, tools, and the prompt's first messages.

        These are the messages up to the first one that is not the system's. Other versions share no cache entries.
        """
        first = self.open_call.first_turn
        return f"{self.policy} {self.start.tools_hash} {first}" if first else ""

    @property
    def head_sent(self) -> bool:
        """Whether the client has the head of a stream that has not ended."""
        return self.phase is CallPhase.HEAD_SENT

    def falls_back(self, error: UpstreamError) -> bool:
        """Whether another model is asked after this error; the client must have nothing of this call."""
        return self.phase is CallPhase.OPEN and self.fallbacks.model_after(error) is not None

    def enter(self, phase: CallPhase) -> None:
        """Move to the next phase. Raises RuntimeError for a transition that the table does not have."""
        if phase not in _NEXT[self.phase]:
            raise RuntimeError(f"call {self.start.call_id} cannot go from {self.phase.name} to {phase.name}")
        self.phase = phase

    def mark_head_sent(self) -> None:
        """Record that the client has the head of the stream."""
        self.enter(CallPhase.HEAD_SENT)

    def overhead(self) -> float:
        """Return the seconds so far that were not spent waiting for the upstream."""
        now = time.perf_counter()
        waiting = 0.0 if self.waiting_since is None else now - self.waiting_since
        return max(0.0, now - self.arrived - self.upstream_seconds - waiting)

    def stop_waiting(self) -> None:
        """Record that the upstream has answered or failed."""
        if self.waiting_since is not None:
            self.upstream_seconds += time.perf_counter() - self.waiting_since
            self.waiting_since = None

    @contextmanager
    def not_waiting(self) -> Iterator[None]:
        """Count what happens meanwhile as the proxy's own time, not as waiting for the upstream."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.upstream_seconds -= time.perf_counter() - began

    def stream_head(self) -> Message | None:
        """Return the head of a stream, or None if it has been sent."""
        if self.phase is not CallPhase.OPEN:
            return None
        return {"type": "http.response.start", "status": 200, "headers": self.headers(streamed=True)}

    def headers(self, *, streamed: bool = False) -> Headers:
        """Return the response headers of every captured call."""
        start = self.open_call.start
        return [
            SSE if streamed else JSON,
            (b"x-request-id", self.request_id),
            *(((b"request-id", self.request_id),) if start.dialect == "messages" else ()),  # Anthropic's name
            (b"x-ratchet-call", start.call_id.encode()),
            (b"x-ratchet-trajectory", start.trajectory_id.encode()),
            (b"x-ratchet-policy", self.policy.encode()),
            (b"x-ratchet-overhead-ms", b"%.3f" % (self.overhead() * 1000)),
            *(((b"x-ratchet-fallback-from", self.failed_model.encode()),) if self.failed_model else ()),
        ]
