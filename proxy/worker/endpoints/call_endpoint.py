"""The hot path: one captured call, in whatever dialect it is asked.

In order: read the request; fix trajectory, policy version and sampling; journal the beginning; swap a prompt in where
the version or the rollout has one; forward; pass the answer on as it comes, without what the client did not ask for;
make the end durable; send the last byte.
A client that leaves stops the upstream at once, and what was generated is recorded.

What a request means and how an answer is worded is the dialect's; nothing here knows one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence

import msgspec
from starlette.types import Receive, Scope, Send

from ratchet.proxy.coordinator.conversations.token_contexts import TokenContexts
from ratchet.proxy.coordinator.limits.rate_limits import TOKEN_RESERVATION, TokenReservation
from ratchet.proxy.coordinator.linking.linker import TrajectoryLinker
from ratchet.proxy.coordinator.rollouts.rollout_plans import PREFIX, RolloutPlan, Rollouts
from ratchet.proxy.coordinator.versions.policy_cache import PolicyCache
from ratchet.proxy.dialects import tool_grammar
from ratchet.proxy.dialects.chat import PATH
from ratchet.proxy.dialects.dialect import LARGE, Dialect, ParsedRequest, ResponseEncoder
from ratchet.proxy.errors import ClientDisconnected, UpstreamDisconnected, UpstreamError, upstream_refusal
from ratchet.proxy.messages.link_records import AttemptKey
from ratchet.proxy.runtime.thread_pools import run_parsing
from ratchet.proxy.telemetry.metrics import Metrics, error_label
from ratchet.proxy.wire.asgi import CLIENT_LEFT, KEY_ID, headers_of, send_bytes
from ratchet.proxy.wire.body_bounds import BodyBounds, read_json
from ratchet.proxy.wire.context_limit import parse_context_overflow
from ratchet.proxy.wire.request_body import ChatRequest
from ratchet.proxy.wire.sse import DONE, SseParser
from ratchet.proxy.wire.upstream_response import UpstreamResponse
from ratchet.proxy.worker.call.active_call import ActiveCall
from ratchet.proxy.worker.call.observer import CallObserver
from ratchet.proxy.worker.call.prompt_swap import swapped
from ratchet.proxy.worker.call.recorder import CallOutcome, Recorder
from ratchet.proxy.worker.forwarding.forwarders import Forwarder
from ratchet.proxy.worker.http import request_identity
from ratchet.proxy.worker.http.disconnect_watch import DisconnectWatch
from ratchet.proxy.worker.http.sse_keep_alive import SseKeepAlive
from ratchet.store.ids import new_id
from ratchet.store.records import CallBegun
from ratchet.store.states import CallState

log = logging.getLogger("ratchet.proxy")

_RETRIED = (408, 409, 429)  # and every 5xx: what the SDKs try again
_KEPT_HEADERS = ("retry-after", "retry-after-ms", "x-should-retry")


class CallEndpoint:
    """The endpoint of one dialect; its collaborators are given once."""

    def __init__(
        self,
        dialect: Dialect,
        policies: PolicyCache,
        linker: TrajectoryLinker,
        recorder: Recorder,
        forwarder: Forwarder,
        contexts: TokenContexts | None,
        rollouts: Rollouts,
        metrics: Metrics,
        observer: CallObserver,
        bounds: BodyBounds,
        keep_alive: float,
        tool_strict_level: tool_grammar.Level,
        longest_context: Callable[[], int | None],
    ) -> None:
        self._dialect = dialect
        self._policies = policies
        self._linker = linker
        self._recorder = recorder
        self._forwarder = forwarder
        self._contexts = contexts
        self._rollouts = rollouts
        self._metrics = metrics
        self._observer = observer
        self._bounds = bounds
        self._keep_alive = keep_alive
        self._tool_strict_level = tool_strict_level
        self._longest_context = longest_context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = time.perf_counter()
        body = await read_json(receive, self._bounds)
        asked = await self._dialect.read(body, scope[KEY_ID])
        if asked.request.tools:
            asked = tool_grammar.noted(asked, self._tool_strict_level)
        headers = headers_of(scope)
        named = request_identity.named(scope, headers, asked.request)
        # Nothing of a rollout is known before the store has told it; any other call does not wait.
        plan = await self._rollouts.find_plan(named[0], scope[KEY_ID]) if named[0] else None
        hold: TokenReservation | None = scope.get(TOKEN_RESERVATION)
        if hold is not None:
            context = None if asked.request.model in self._policies.other_models else self._longest_context()
            hold.reserve(asked.request.sampling, body, context)
        model = plan.model_for(asked.request.model, self._policies.other_models) if plan else asked.request.model
        if "@" in model:
            await self._policies.refresh_if_unknown(model)
        exchange = self._open(scope, headers, asked, named, plan, model, arrived)
        self._metrics.open_calls += 1
        with DisconnectWatch(receive, scope.get(CLIENT_LEFT)) as watch:
            try:
                await self._serve(exchange, self._observer.begun(exchange, headers), send, watch)
            except UpstreamError as error:
                await self._fail(exchange, error, send, watch)
            except ClientDisconnected:
                watch.left = True
                self._abandon(exchange, left=True)
            except asyncio.CancelledError:
                self._abandon(exchange, watch.left)
                if not watch.left:
                    raise
                watch.forgive()
            finally:
                if not exchange.over:  # a defect of ours; the run must not stay under way for ever
                    exchange.failure = "internal_error"
                    self._end(exchange, CallState.FAILED, 500, "the proxy failed")
                self._metrics.open_calls -= 1
                self._observer.ended(exchange)
                if hold is not None:
                    hold.use(exchange.capture.tokens(), left=watch.left)

    def _open(
        self,
        scope: Scope,
        headers: dict[bytes, bytes],
        asked: ParsedRequest,
        named: request_identity.Named,
        plan: RolloutPlan | None,
        model: str,
        arrived: float,
    ) -> ActiveCall:
        """Fix the call's identity, version and sampling, and journal its beginning. Nothing here waits."""
        request, nodes, keys = asked.request, asked.nodes, asked.keys
        alias, wanted = self._policies.resolve_model(model)
        now = time.time()
        attempt = AttemptKey(scope[KEY_ID], nodes[-1].hash if nodes else "", request.tools_hash)
        other = alias in self._policies.other_models
        found = request_identity.evidence(headers, request, keys, (alias, wanted), attempt, now, named, other, plan)
        link = self._linker.find_link(found)
        version = wanted if link.version is None else link.version
        version = self._begins(alias, link.trajectory_id, plan) if version is None else version
        link = msgspec.structs.replace(link, version=version)
        self._linker.begin_call(link, alias, version, now)
        if plan is None and link.trajectory_id.startswith(PREFIX):  # found by its words
            plan = self._rollouts.cached_plan(link.trajectory_id, scope[KEY_ID])
        task, role, tags = request_identity.labels(headers)
        begun = CallBegun(
            call_id=new_id("call"),
            trajectory_id=link.trajectory_id,
            started_at=now,
            alias=alias,
            version=version,
            dialect=self._dialect.name,
            streamed=request.streamed,
            linked_by=link.linked_by,
            prompt_node=attempt.prompt_node,
            tools_hash=request.tools_hash,
            parent_call=link.parent.call_id if link.parent else None,
            parent_choice=link.parent.choice if link.parent else 0,
            key_id=scope[KEY_ID],
            task=plan.task if plan else task,
            role=role,
            tags=tags,
            purpose=link.purpose,
            sampling=request.sampling,
        )
        opened = self._recorder.begin(asked, link, begun)
        return ActiveCall(
            request=self._with_prompt(request, opened.begun, plan),
            opened=opened,
            voice=asked.voice(begun),
            request_id=request_identity.request_id(headers, begun.call_id),
            attempt=attempt,
            arrived=arrived,
        )

    def _begins(self, alias: str, trajectory_id: str, plan: RolloutPlan | None) -> int:
        """Return the version of a new trajectory; what is measured begins on the live one, not on a canary."""
        if plan is None or plan.plain:
            return self._policies.version_for_new_trajectory(alias, trajectory_id)
        return self._policies.live_version(alias)

    def _with_prompt(self, request: ChatRequest, begun: CallBegun, plan: RolloutPlan | None) -> ChatRequest:
        """Return the request as it goes to vLLM: with the rollout's prompt, else the version's, if there is one."""
        prompt = plan.prompt_for(begun.alias, self._policies.other_models) if plan else None
        prompt = prompt or self._policies.prompt_of(begun.alias, begun.version)
        if prompt is None or self._dialect.path != PATH:
            return request
        return swapped(request, prompt, self._linker.task_family(begun))

    async def _serve(self, exchange: ActiveCall, trace: dict[str, str], send: Send, watch: DisconnectWatch) -> None:
        quiet = None
        if exchange.request.streamed and self._keep_alive:
            quiet = SseKeepAlive(send, self._keep_alive, exchange.head, exchange.begin)
        try:
            answer = await self._forward(exchange, trace)
            try:
                if answer.status != 200:
                    await self._refuse(exchange, answer, send, watch, quiet)
                elif exchange.request.streamed:
                    await self._stream(exchange, answer, send, watch, quiet)
                else:
                    await self._whole(exchange, answer, send, watch)
            finally:
                answer.close()
        finally:
            if quiet is not None:
                quiet.stop()

    async def _forward(self, exchange: ActiveCall, trace: dict[str, str]) -> UpstreamResponse:
        exchange.waiting_since = time.perf_counter()
        try:
            return await self._forwarder.forward(exchange, self._dialect.path, trace)
        finally:
            exchange.waited()

    async def _whole(self, exchange: ActiveCall, answer: UpstreamResponse, send: Send, watch: DisconnectWatch) -> None:
        waited = time.perf_counter()
        body = await answer.read()
        exchange.upstream_seconds += time.perf_counter() - waited
        exchange.first_byte_at = time.time()
        read = exchange.voice.whole
        payload = await run_parsing(read, body) if len(body) > LARGE else read(body)
        watch.check()
        await _wait(self._end(exchange, CallState.ANSWERED, 200))
        await self._last(exchange, 200, payload, exchange.headers(), send, watch)

    async def _stream(
        self,
        exchange: ActiveCall,
        answer: UpstreamResponse,
        send: Send,
        watch: DisconnectWatch,
        quiet: SseKeepAlive | None,
    ) -> None:
        if quiet is not None:
            await quiet.settle()
        if head := exchange.head():
            exchange.begin()
            await send(head)
        exchange.spent = exchange.overhead()
        events = SseParser()
        pieces = answer.pieces()
        async for piece in pieces:
            out, done = _client_events(exchange.voice, events, piece)
            if out:
                await send({"type": "http.response.body", "body": b"".join(out), "more_body": True})
                if quiet is not None:
                    quiet.spoke()
                if exchange.first_byte_at is None:
                    exchange.first_byte_at = time.time()
            if done:
                break
        else:
            raise UpstreamDisconnected(f"upstream {answer.url} ended its stream without [DONE]")
        watch.check()
        last = exchange.voice.end()
        broken = exchange.capture.error
        if broken:
            exchange.failure = "stream_error"
        await _wait(self._end(exchange, CallState.FAILED if broken else CallState.ANSWERED, 200, broken))
        watch.stop()
        if quiet is not None:
            quiet.stop()
        await send({"type": "http.response.body", "body": last})
        self._observer.ended(exchange)
        with contextlib.suppress(TimeoutError, UpstreamError):
            async with asyncio.timeout(1.0):  # read to the end, so that the connection can be used again
                async for _ in pieces:
                    pass

    async def _refuse(
        self,
        exchange: ActiveCall,
        answer: UpstreamResponse,
        send: Send,
        watch: DisconnectWatch,
        quiet: SseKeepAlive | None,
    ) -> None:
        """Pass on an upstream's error: its status, its body, and when to come back; or as an event."""
        if answer.status < 400:
            raise UpstreamDisconnected(f"upstream {answer.url} answered {answer.status}, which is no answer to a call")
        body, message = self._dialect.shape.encode_upstream_error(answer.status, await answer.read())
        self._metrics.upstream_errors.labels(f"status_{answer.status // 100}xx").inc()
        exchange.failure = f"status_{answer.status // 100}xx"
        if quiet is not None:
            quiet.stop()
        if exchange.started:
            await _wait(self._end(exchange, CallState.FAILED, 200, message))
            watch.stop()
            refused = parse_context_overflow(answer.status, message) or upstream_refusal(message, answer.status)
            await send({"type": "http.response.body", "body": exchange.voice.failed(refused)})
            return
        headers = exchange.headers()
        headers += [(n.encode(), answer.headers[n].encode()) for n in _KEPT_HEADERS if n in answer.headers]
        await _wait(self._end(exchange, CallState.FAILED, answer.status, message))
        await self._last(exchange, answer.status, body, headers, send, watch)

    async def _fail(self, exchange: ActiveCall, error: UpstreamError, send: Send, watch: DisconnectWatch) -> None:
        """The upstream failed us: an error answer, or an error event where the answer has begun."""
        self._metrics.upstream_errors.labels(error.code or "other").inc()
        log.warning("event=call_failed call=%s reason=%r", exchange.opened.begun.call_id, str(error))
        if not exchange.over:
            exchange.failure = error_label(error)
            await _wait(self._end(exchange, CallState.FAILED, 200 if exchange.started else error.status, str(error)))
        if exchange.started:
            watch.stop()
            await send({"type": "http.response.body", "body": exchange.voice.failed(error)})
        else:
            payload = self._dialect.shape.encode_error(error)
            headers = exchange.headers()
            if error.retry_after is not None:
                headers.append((b"retry-after", b"%d" % error.retry_after))
            await self._last(exchange, error.status, payload, headers, send, watch)

    def _abandon(self, exchange: ActiveCall, left: bool) -> None:
        """The call ends early, by its client or by a stop of the proxy; what was generated so far is recorded."""
        if exchange.over:  # recorded as answered, but the answer did not go out
            self._linker.add_unanswered(exchange.opened.link, exchange.attempt, time.time())
        else:
            exchange.failure = "client_disconnected" if left else "shutting_down"
            status, reason = (499, "the client left") if left else (503, "the proxy was stopped")
            self._end(exchange, CallState.ABORTED, status, reason)

    def _end(
        self, exchange: ActiveCall, state: CallState, status: int, error: str | None = None
    ) -> asyncio.Future[bool] | None:
        """Record the end, once; return what the last byte has to wait for."""
        exchange.over = True
        now = time.time()
        end = CallOutcome(state, status, now, exchange.first_byte_at, error, exchange.url)
        leaves, durable = self._recorder.end(exchange.opened, exchange.capture, end)
        self._linker.end_call(exchange.opened.link, leaves, now)
        if self._contexts is not None and exchange.opened.ended is not None:
            self._contexts.add_answers(exchange.opened.ended)
        if state == CallState.ABORTED or status in _RETRIED or status >= 500:
            self._linker.add_unanswered(exchange.opened.link, exchange.attempt, now)
        return durable

    async def _last(
        self,
        exchange: ActiveCall,
        status: int,
        body: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        send: Send,
        watch: DisconnectWatch,
    ) -> None:
        exchange.spent = exchange.overhead()
        watch.stop()
        await send_bytes(send, status, body, list(headers))


def _client_events(voice: ResponseEncoder, events: SseParser, piece: bytes) -> tuple[list[bytes], bool]:
    """Return the events of `piece` in the client's form, and whether the stream is done."""
    out: list[bytes] = []
    for data, raw in events.feed(piece):
        if data is None:
            out.append(raw)
        elif data == DONE:
            return out, True
        elif worded := voice.chunk(data):
            out.append(worded)
    return out, False


async def _wait(durable: asyncio.Future[bool] | None) -> None:
    if durable is not None:
        await durable
