"""The hot path: one captured call, in any dialect.

In order: read the request; resolve its placement (trajectory, version, prompt); journal the beginning; substitute the
prompt; forward; pass the response on as it arrives, without the fields that the client did not ask for; make the end
durable; send the last byte. If the client disconnects, the upstream request is aborted at once, and the tokens
generated so far are recorded.

The dialect reads requests and encodes responses; this file does not depend on any of them. `active_call.py` has the
states of a call and its outcomes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec
from starlette.types import Receive, Scope, Send

from ratchet.proxy.coordinator.keys.key_cache import Caller
from ratchet.proxy.coordinator.limits.rate_limits import TOKEN_RESERVATION, KeyMeter, TokenReservation
from ratchet.proxy.coordinator.versions.policy_cache import Access
from ratchet.proxy.dialects import token_cap, tool_grammar
from ratchet.proxy.dialects.dialect import LARGE, Dialect, ParsedRequest, ResponseEncoder
from ratchet.proxy.dialects.vllm_fields import with_one_system_message
from ratchet.proxy.errors import ClientDisconnected, UpstreamDisconnected, UpstreamError, stopped, upstream_refusal
from ratchet.proxy.messages.link_records import CallIdentity, Placement
from ratchet.proxy.model_list import FallbackRules
from ratchet.proxy.runtime.thread_pools import run_parsing
from ratchet.proxy.wire.asgi import CALLER, CLIENT_LEFT, KEY_ID, client_address, headers_of, read_body, send_bytes
from ratchet.proxy.wire.capture import error_in
from ratchet.proxy.wire.context_limit import parse_context_overflow
from ratchet.proxy.wire.request_body import ChatRequest
from ratchet.proxy.wire.upstream_response import DONE, SseParser, UpstreamResponse
from ratchet.proxy.worker.call import active_call
from ratchet.proxy.worker.call.active_call import ActiveCall, CallOutcome, CallPhase, OpenCall
from ratchet.proxy.worker.call.call_admission import CallAdmission, admission_request
from ratchet.proxy.worker.call.fallbacks import NO_FALLBACKS, fallbacks_of, may_fall_back
from ratchet.proxy.worker.call.observer import CallObserver
from ratchet.proxy.worker.call.recorder import Recorder
from ratchet.proxy.worker.forwarding.forwarders import Forwarder
from ratchet.proxy.worker.http import request_identity
from ratchet.proxy.worker.http.disconnect_watch import DisconnectWatch
from ratchet.proxy.worker.http.sse_keep_alive import SseKeepAlive
from ratchet.store.ids import new_id
from ratchet.store.records import CallStarted
from ratchet.store.states import CallState

log = logging.getLogger("ratchet.proxy")

_FORWARDED_HEADERS = ("retry-after", "retry-after-ms", "x-should-retry")  # of an upstream's error response
_DRAIN_SECONDS = 1.0
_CLIENT_LEFT = 499  # recorded as status of a call whose client disconnected
_NO_STREAM = (b"{", b"[", b"<")  # JSON or HTML: server-sent events begin with a field's name or a colon
_LOGPROBS_REFUSED = (b"logprob", b"JSON compliant")  # in vLLM's refusals; the second one of a logprob that is NaN


class CallLimits(NamedTuple):
    """The settings of the endpoint.

    context_limit  a model's context in tokens, None if unknown
    only_agent     the agent of a request that names none; raises BadRequest
    """

    body_bytes: int
    keep_alive_seconds: float
    tool_strict_level: tool_grammar.Level
    context_limit: Callable[[str], int | None]
    only_agent: Callable[[Access], str]
    agent_meters: Mapping[str, KeyMeter] = MappingProxyType({})  # of the agents with limits
    fallbacks: FallbackRules = FallbackRules()


class CallEndpoint:
    """The endpoint of one dialect."""

    def __init__(
        self,
        dialect: Dialect,
        admission: CallAdmission,
        recorder: Recorder,
        forwarder: Forwarder,
        observer: CallObserver,
        limits: CallLimits,
    ) -> None:
        self._dialect = dialect
        self._admission = admission
        self._recorder = recorder
        self._forwarder = forwarder
        self._observer = observer
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._limits.agent_meters or TOKEN_RESERVATION in scope:
            await self._run(scope, receive, send)
            return
        reservation = scope[TOKEN_RESERVATION] = TokenReservation()
        try:
            await self._run(scope, receive, send)
        finally:
            reservation.settle()

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = time.perf_counter()
        body = (await read_body(receive, self._limits.body_bytes)).removeprefix(BOM_UTF8)
        parsed = await self._dialect.read(request_identity.with_deployment(scope, body), scope[KEY_ID])
        if not parsed.request.model:
            request = msgspec.structs.replace(parsed.request, model=self._limits.only_agent(scope[CALLER].access))
            parsed = msgspec.structs.replace(parsed, request=request)
        if parsed.request.tools:
            parsed = tool_grammar.mark_tool_grammar(parsed, self._limits.tool_strict_level)
        headers = headers_of(scope)
        identity = request_identity.read_identity(scope, headers, parsed.request)
        caller: Caller = scope[CALLER]
        if caller.max_tokens is not None:
            context = self._limits.context_limit(parsed.request.model)
            parsed = token_cap.cap_max_tokens(parsed, caller.max_tokens, context)
        reservation: TokenReservation | None = scope.get(TOKEN_RESERVATION)
        if reservation is not None:
            alias = parsed.request.model.partition("@")[0]
            meter = self._limits.agent_meters.get(alias)
            if meter is not None and caller.access.has_agent(alias):
                reservation.count_agent(meter)
            context = self._limits.context_limit(parsed.request.model)
            reservation.reserve(parsed.request.sampling, body, context)
        fallbacks, failed_model = fallbacks_of(self._limits.fallbacks, parsed.request.model, caller.access), None
        while True:
            placement = await self._admission.resolve(admission_request(parsed, identity, caller))
            call = self._begin(parsed, identity, placement, headers, arrived)
            call.client, call.failed_model = client_address(scope), failed_model
            call.fallbacks = fallbacks if may_fall_back(call.start) else NO_FALLBACKS
            error = await self._answer(call, scope, receive, send)
            following = None if error is None else call.fallbacks.model_after(error)
            if error is None or following is None:
                return
            fallbacks, failed_model = call.fallbacks.rest_after(error), failed_model or parsed.request.model
            self._observer.fell_back(call, following, error)
            request = msgspec.structs.replace(parsed.request, model=following)
            parsed = msgspec.structs.replace(parsed, request=request)

    async def _answer(self, call: ActiveCall, scope: Scope, receive: Receive, send: Send) -> UpstreamError | None:
        """Serve a call to its end. Return an error that another model may make up for; then nothing was sent."""
        reservation: TokenReservation | None = scope.get(TOKEN_RESERVATION)
        trace = self._observer.call_started(call, headers_of(scope))
        with DisconnectWatch(receive, scope.get(CLIENT_LEFT)) as watch:
            try:
                await self._serve(call, trace, send, watch)
            except UpstreamError as error:
                error.model = call.policy
                if not call.falls_back(error):
                    await self._fail(call, error, send, watch)
                else:
                    self._observer.upstream_failed(error.code or "other")
                    self._record_end(call, active_call.fell_back(error), error.status)
                    return error
            except ClientDisconnected:
                watch.client_left = True
                self._abandon(call, active_call.CLIENT_DISCONNECTED, _CLIENT_LEFT)
            except asyncio.CancelledError:
                if not watch.client_left:
                    await self._stop(call, send, watch)
                else:
                    self._abandon(call, active_call.CLIENT_DISCONNECTED, _CLIENT_LEFT)
                watch.uncancel_task()
            finally:
                if call.phase in (CallPhase.OPEN, CallPhase.HEAD_SENT):  # a bug: the trajectory must not stay open
                    self._record_end(call, active_call.INTERNAL_FAILURE, 500)
                self._observer.call_ended(call)
                if reservation is not None:
                    reservation.use(call.capture.tokens(), left=watch.client_left)
        return None

    def _begin(
        self,
        parsed: ParsedRequest,
        identity: CallIdentity,
        placement: Placement,
        headers: dict[bytes, bytes],
        arrived: float,
    ) -> ActiveCall:
        """Journal the beginning of a call and return its state. Does not wait."""
        request, link = parsed.request, placement.link
        start = CallStarted(
            call_id=new_id("call"),
            trajectory_id=link.trajectory_id,
            started_at=placement.started_at,
            alias=placement.alias,
            version=placement.version,
            dialect=self._dialect.name,
            streamed=request.streamed,
            linked_by=link.linked_by,
            prompt_node=placement.attempt.prompt_node,
            tools_hash=request.tools_hash,
            parent_call=link.parent.call_id if link.parent else None,
            parent_choice=link.parent.choice if link.parent else 0,
            key_id=placement.attempt.key_id,
            task=placement.task,
            role=identity.role,
            tags=identity.tags,
            purpose=link.purpose,
            sampling=request.sampling,
            draw=placement.draw,
        )
        open_call = self._recorder.record_begin(parsed, placement, start)
        return ActiveCall(
            request=self._for_vllm(request, open_call),
            open_call=open_call,
            encoder=parsed.make_encoder(start),
            request_id=request_identity.request_id(headers, start.call_id),
            arrived=arrived,
        )

    def _for_vllm(self, request: ChatRequest, open_call: OpenCall) -> ChatRequest:
        """Return the request for vLLM: with the placement's system prompt, if it has one, and with no other."""
        prompt = open_call.placement.prompt
        if not request.is_chat:
            return request
        if prompt is not None:
            request = request.with_prompt(prompt, self._admission.task_family(open_call.placement, open_call.start))
        return with_one_system_message(request)

    async def _serve(self, call: ActiveCall, trace: dict[str, str], send: Send, watch: DisconnectWatch) -> None:
        keep_alive = None
        if call.request.streamed and self._limits.keep_alive_seconds:
            keep_alive = SseKeepAlive(send, self._limits.keep_alive_seconds, call.stream_head, call.mark_head_sent)
        try:
            while True:
                response = await self._forward(call, trace)
                try:
                    if response.status == 200 and call.request.streamed:
                        await self._stream(call, response, send, watch, keep_alive)
                        return
                    if response.status == 200:
                        await self._send_whole(call, response, send, watch)
                        return
                    if response.status < 400:
                        raise UpstreamDisconnected(f"answered a call with status {response.status}", url=response.url)
                    body = await response.read()
                    if not _is_refused_for_logprobs(call.request, response.status, body):
                        await self._refuse(call, response, body, response.status, send, watch, keep_alive)
                        return
                finally:
                    response.close()
                call.request = msgspec.structs.replace(call.request, adds_logprobs=False)
        finally:
            if keep_alive is not None:
                keep_alive.stop()

    async def _forward(self, call: ActiveCall, trace: dict[str, str]) -> UpstreamResponse:
        call.waiting_since = time.perf_counter()
        try:
            return await self._forwarder.forward(call, self._dialect.path, trace)
        finally:
            call.stop_waiting()

    async def _send_whole(
        self, call: ActiveCall, response: UpstreamResponse, send: Send, watch: DisconnectWatch
    ) -> None:
        """Pass on a response that is not streamed."""
        waiting_since = time.perf_counter()
        body = await response.read()
        call.upstream_seconds += time.perf_counter() - waiting_since
        call.first_byte_at = time.time()
        encode = call.encoder.whole
        try:
            payload = await run_parsing(encode, body) if len(body) > LARGE else encode(body)
        except UpstreamDisconnected:
            if (status := error_in(body)) is None:
                raise
            await self._refuse(call, response, body, status, send, watch, None)
            return
        watch.check()
        await _wait(self._record_end(call, active_call.outcome_of(call.capture), 200))
        await _send_last(call, 200, payload, call.headers(), send, watch)

    async def _stream(
        self,
        call: ActiveCall,
        response: UpstreamResponse,
        send: Send,
        watch: DisconnectWatch,
        keep_alive: SseKeepAlive | None,
    ) -> None:
        """Pass on a stream; its last events wait until the end is durable."""
        pieces = response.pieces()
        piece = await anext(pieces, None)
        if piece is not None and piece.lstrip().startswith(_NO_STREAM):
            body = piece + b"".join([piece async for piece in pieces])
            if (status := error_in(body)) is None:
                raise UpstreamDisconnected("did not answer with server-sent events", url=response.url)
            await self._refuse(call, response, body, status, send, watch, keep_alive)
            return
        if keep_alive is not None:
            await keep_alive.wait_for_write()
        if head := call.stream_head():
            call.mark_head_sent()
            await send(head)
        call.overhead_at_send = call.overhead()
        parser = SseParser()
        while piece is not None:
            out, call.capture.is_done = _encode_events(call.encoder, parser, piece)
            if out:
                await send({"type": "http.response.body", "body": b"".join(out), "more_body": True})
                if keep_alive is not None:
                    keep_alive.mark_sent()
                if call.first_byte_at is None:
                    call.first_byte_at = time.time()
            piece = None if call.capture.is_done else await anext(pieces, None)
        outcome = active_call.outcome_of(call.capture)
        if outcome.state != CallState.ANSWERED and not call.capture.is_done and call.capture.error is None:
            raise UpstreamDisconnected("ended its stream without [DONE]", url=response.url)
        watch.check()
        last_events = call.encoder.end()
        await _wait(self._record_end(call, outcome, 200))
        watch.stop()
        if keep_alive is not None:
            keep_alive.stop()
        await send({"type": "http.response.body", "body": last_events})
        self._observer.call_ended(call)
        with contextlib.suppress(TimeoutError, UpstreamError):
            async with asyncio.timeout(_DRAIN_SECONDS):  # read to the end, so that the connection can be reused
                async for _ in pieces:
                    pass

    async def _refuse(
        self,
        call: ActiveCall,
        response: UpstreamResponse,
        body: bytes,
        status: int,
        send: Send,
        watch: DisconnectWatch,
        keep_alive: SseKeepAlive | None,
    ) -> None:
        """Pass on an upstream's error: status, body and retry headers; as an event if the head was sent."""
        body, message = self._dialect.shape.encode_upstream_error(status, body)
        error = parse_context_overflow(status, message) or upstream_refusal(message, status)
        if call.falls_back(error):
            raise error
        if keep_alive is not None:
            keep_alive.stop()
        head_sent, outcome = call.head_sent, active_call.refused(status, message)
        self._observer.upstream_failed(str(outcome.failure))
        await _wait(self._record_end(call, outcome, status))
        if head_sent:
            watch.stop()
            await send({"type": "http.response.body", "body": call.encoder.failed(error)})
            return
        headers = call.headers()
        headers += [(n.encode(), response.headers[n].encode()) for n in _FORWARDED_HEADERS if n in response.headers]
        await _send_last(call, status, body, headers, send, watch)

    async def _fail(self, call: ActiveCall, error: UpstreamError, send: Send, watch: DisconnectWatch) -> None:
        """Answer with an upstream failure, as an error event if the head was sent."""
        self._observer.upstream_failed(error.code or "other")
        log.warning("event=call_failed call=%s reason=%r", call.start.call_id, str(error))
        head_sent = call.head_sent
        await _wait(self._record_end(call, active_call.upstream_failed(error), error.status))
        if head_sent:
            watch.stop()
            await send({"type": "http.response.body", "body": call.encoder.failed(error)})
            return
        headers = call.headers()
        if error.retry_after is not None:
            headers.append((b"retry-after", b"%d" % error.retry_after))
        await _send_last(call, error.status, self._dialect.shape.encode_error(error), headers, send, watch)

    async def _stop(self, call: ActiveCall, send: Send, watch: DisconnectWatch) -> None:
        """End a call that the stopping server cancels. Raises CancelledError, unless an event could end its stream."""
        head_sent = call.head_sent
        self._abandon(call, active_call.SHUTTING_DOWN, stopped().status)
        if not head_sent:
            raise asyncio.CancelledError
        watch.stop()
        await send({"type": "http.response.body", "body": call.encoder.failed(stopped())})

    def _abandon(self, call: ActiveCall, outcome: CallOutcome, status: int) -> None:
        """End a call early: its client disconnected or the proxy stops. The tokens so far are recorded."""
        if call.phase in (CallPhase.OPEN, CallPhase.HEAD_SENT):
            self._record_end(call, outcome, status)
        else:  # recorded, but the response was not sent
            self._admission.mark_unanswered(call.open_call.placement)

    def _record_end(self, call: ActiveCall, outcome: CallOutcome, status: int) -> list[asyncio.Future[bool] | None]:
        """Record the end of a call; return what the last byte waits for: the journal's commit, the coordinator.

        `status` is the answer's; a client that has the head of a stream got 200.
        """
        sent = 200 if call.head_sent and status != _CLIENT_LEFT else status
        call.enter(CallPhase.RECORDED)
        call.failure = outcome.failure
        leaves, durable = self._recorder.record_end(call, outcome, sent)
        open_call = call.open_call
        linked = self._admission.end_call(
            open_call.placement, open_call.ended, leaves, time.time(), retryable=outcome.is_retryable
        )
        return [durable, linked]


async def _send_last(
    call: ActiveCall,
    status: int,
    body: bytes,
    headers: Sequence[tuple[bytes, bytes]],
    send: Send,
    watch: DisconnectWatch,
) -> None:
    """Send a complete response."""
    call.overhead_at_send = call.overhead()
    watch.stop()
    await send_bytes(send, status, body, list(headers))


def _encode_events(encoder: ResponseEncoder, parser: SseParser, piece: bytes) -> tuple[list[bytes], bool]:
    """Return the events of `piece` in the client's form, and whether the stream is complete."""
    out: list[bytes] = []
    for data, raw in parser.feed(piece):
        if data is None:
            out.append(raw)
        elif data == DONE:
            return out, True
        elif events := encoder.chunk(data):
            out.append(events)
    return out, False


def _is_refused_for_logprobs(request: ChatRequest, status: int, body: bytes) -> bool:
    """Return whether vLLM refused a call for the logprobs that only the record needs."""
    if status != 400 or request.asks_logprobs or not request.adds_logprobs:
        return False
    return any(text in body for text in _LOGPROBS_REFUSED)


async def _wait(pending: Sequence[asyncio.Future[bool] | None]) -> None:
    for future in pending:  # all of them are under way
        if future is not None:
            await future
