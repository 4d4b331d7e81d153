"""Decides for each call whether to continue the exact sampled ids or to use plain chat, and does it.

    situation                                                     result
    ------------------------------------------------------------  --------------------------------------------------
    no recorded answer before it, or no context to splice onto    plain chat
    the render begins with the recorded ids                       plain chat, which is exact already
    the render differs only in sampled tokens                     generate after the recorded ids, then derender
    any doubt                                                     plain chat, a fork; counted by reason
    any failure before the first token                            plain chat; counted by reason

Promise: the client is never worse off than with plain chat. It gets a response of the same form, and a failure before
the first token falls back to plain chat from the start.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ratchet.proxy.coordinator.conversations.token_contexts import TokenContexts
from ratchet.proxy.coordinator.versions.policy_cache import PolicyCache
from ratchet.proxy.errors import UpstreamError
from ratchet.proxy.exact import chat_templates
from ratchet.proxy.exact.chat_templates import Templates
from ratchet.proxy.exact.scale_out import (
    GENERATE,
    NOT_OFFERED,
    Fields,
    Rendered,
    ScaleOut,
    ScaleOutError,
    generate_body,
)
from ratchet.proxy.exact.splice import Context, ContextFork, Spliced, splice
from ratchet.proxy.exact.streamed_response import StreamedResponse, StreamPacer
from ratchet.proxy.exact.whole_response import DerenderRequest, read_whole_response
from ratchet.proxy.messages.link_records import Leaf
from ratchet.proxy.messages.text_fingerprints import short_key
from ratchet.proxy.runtime.thread_pools import run_parsing
from ratchet.proxy.telemetry.metrics import INTERNAL_ERROR, ProxyMetrics
from ratchet.proxy.telemetry.outage_warnings import OutageWarnings
from ratchet.proxy.upstreams.http_connection import HttpResponse
from ratchet.proxy.upstreams.replica_pool import Replica, ReplicaPool
from ratchet.proxy.upstreams.vllm_client import Upstream
from ratchet.proxy.wire import lax_values, request_body
from ratchet.proxy.wire.request_body import ChatRequest
from ratchet.proxy.wire.upstream_response import UpstreamResponse
from ratchet.proxy.worker.call.active_call import ActiveCall
from ratchet.proxy.worker.forwarding.forwarders import Forwarder

log = logging.getLogger("ratchet.proxy")

_LONG_PROMPT = 16_000  # ids; longer prompts are spliced in a thread
_RETRY_SECONDS = 300.0  # until a replica without the endpoints is tried again
# Fields that generate or derender treat differently from plain chat, with the value that has no effect.
_UNSUITED = {
    "add_generation_prompt": True, "continue_final_message": False, "echo": False, "include_reasoning": True,
    "include_stop_str_in_output": False, "return_prompt_text": False, "return_tokens_as_token_ids": False,
    "use_beam_search": False,
} | dict.fromkeys((
    "audio", "ec_transfer_params", "function_call", "functions", "kv_transfer_params", "logprob_token_ids",
    "mm_processor_kwargs", "prompt_logprobs", "truncate_prompt_tokens",
))  # fmt: skip


class ExactForwarder:
    """Continues exact ids where it can, and leaves all other calls to `plain`.

    `required`: log every attempt on a replica that does not offer the endpoints, not only the first.
    """

    def __init__(
        self,
        plain: Forwarder,
        policies: PolicyCache,
        upstream: Upstream,
        pool: ReplicaPool[Replica],
        contexts: TokenContexts,
        metrics: ProxyMetrics,
        *,
        required: bool,
    ) -> None:
        self._plain = plain
        self._policies = policies
        self._upstream = upstream
        self._pool = pool
        self._contexts = contexts
        self._metrics = metrics
        self._required = required
        self._scale_out = ScaleOut(upstream)
        self._templates = Templates(self._scale_out, upstream)
        self._pacers: dict[str, StreamPacer] = {}
        self._not_offered_until: dict[str, float] = {}  # by replica
        self._failures = defaultdict[str, OutageWarnings](lambda: OutageWarnings(log, "exact_context_failed"))

    async def forward(self, call: ActiveCall, path: str, headers: Mapping[str, str]) -> UpstreamResponse:
        """Send a call to `path` and return its response; sets `call.url`. Raises UpstreamError."""
        leaf = call.open_call.placement.link.parent
        if leaf is not None and call.request.is_chat:
            try:
                response = await self._forward_exact(call, leaf, headers)
            except ContextFork as fork:
                self._metrics.exact_splices.labels(fork.reason).inc()
            except UpstreamError as error:
                self._on_fallback(call, error)
            except Exception as error:  # a bug here, or a malformed response: plain chat does not depend on it
                self._metrics.exact_fallbacks.labels(INTERNAL_ERROR).inc()
                log.exception("event=exact_context_error call=%s reason=%r", call.start.call_id, str(error))
            else:
                self._metrics.exact_splices.labels("undrifted" if response is None else "spliced").inc()
                if response is not None:
                    return response
        return await self._plain.forward(call, path, headers)

    def _on_fallback(self, call: ActiveCall, error: UpstreamError) -> None:
        self._metrics.exact_fallbacks.labels(error.code or "other").inc()
        if error.code == NOT_OFFERED:
            url = self._replica_of(call)
            if url not in self._not_offered_until or self._required:
                log.warning("event=exact_context_not_offered upstream=%s reason=%r", url, str(error))
            self._not_offered_until[url] = time.monotonic() + _RETRY_SECONDS
            self._contexts.shrink()
        else:
            self._failures[error.code or "other"].warn(error)

    def _replica_of(self, call: ActiveCall) -> str:
        return self._pool.order(call.start.trajectory_id, self._proven(call), call.prefix)[0].url

    def _proven(self, call: ActiveCall) -> Sequence[str]:
        return self._policies.proven_replicas(call.start.alias, call.start.version)

    async def _forward_exact(self, call: ActiveCall, leaf: Leaf, headers: Mapping[str, str]) -> UpstreamResponse | None:
        """Return the response after the recorded ids; None if plain chat is exact.

        Raises ContextFork, UpstreamError.
        """
        request, start, url = call.request, call.start, self._replica_of(call)
        if self._not_offered_until.get(url, 0.0) > time.monotonic():
            raise ContextFork("not_offered")
        _check_suited(request)
        with call.not_waiting():
            context = await self._contexts.find_context(leaf)
        if context is None:
            raise ContextFork("context_unknown")
        place = _place(call.open_call.keys, leaf)
        if request.messages is not call.open_call.messages:
            place = _place_after_change(place, call.open_call.messages, request.messages)
        body = request.outgoing_fields(self._policies.served_name(start.alias, start.version))
        rendered, spliced = await self._splice(url, start.alias, body, request, place, context)
        if spliced is None:
            return None
        in_text = request.asks_logprobs
        sent = generate_body(rendered, spliced.ids, request.fields, streamed=request.streamed, in_text=in_text)
        derender = DerenderRequest.of(request, f"chatcmpl-{start.call_id}", body, rendered, spliced.ids)
        generated = await self._generate(call, sent, headers)
        try:
            return await self._derender(generated, request, derender)
        except BaseException:
            generated.close()  # vLLM stops generating
            raise

    async def _splice(
        self, url: str, alias: str, body: Fields, request: ChatRequest, place: int, context: Context
    ) -> tuple[Rendered, Spliced | None]:
        """Return the render, and the prompt to use instead of its own. Raises ContextFork, UpstreamError."""
        template = await self._templates.find_template(url, alias, body)
        if request.may_contain(template.turn_end_text) and any(
            chat_templates.renders_text(message, template.turn_end_text)
            for message in request.messages
            if message.get("role") == "assistant"
        ):
            raise ContextFork("turn_end_spelled")
        rendered = await self._scale_out.render(url, body)
        run_splice = partial(splice, context, rendered.ids, template.turn_end)
        spliced = await run_parsing(run_splice) if len(rendered.ids) > _LONG_PROMPT else run_splice()
        if spliced is not None:
            template.check_context_length(len(rendered.ids), len(spliced.ids), _max_tokens(request))
            await self._templates.verify_turn_end(template, url, body, request.messages, place, rendered, spliced.tail)
        return rendered, spliced

    async def _generate(self, call: ActiveCall, body: bytes, headers: Mapping[str, str]) -> HttpResponse:
        """Return generate's response at its headers. Raises UpstreamError."""

        async def send(replica: Replica) -> HttpResponse:
            call.url = replica.url
            return await self._upstream.post_json(replica.url, GENERATE, body, headers)

        response = await self._pool.send(call.start.trajectory_id, send, self._proven(call), call.prefix)
        if response.status != 200:
            try:
                text = await response.read()
            finally:
                response.close()
            raise ScaleOutError(f"{GENERATE} answered {response.status} {text[:300].decode('utf-8', 'replace')}")
        return response

    async def _derender(
        self, generated: HttpResponse, request: ChatRequest, derender: DerenderRequest
    ) -> UpstreamResponse:
        """Return the generated ids as a chat completion. Raises UpstreamError."""
        if not request.streamed:
            try:
                return await read_whole_response(self._scale_out, generated, derender)
            finally:
                generated.close()
        pacer = self._pacers.setdefault(generated.url, StreamPacer())
        response = StreamedResponse(self._scale_out, generated, derender, pacer, self._metrics)
        try:
            await response.wait_for_body()
        except BaseException:
            response.close()
            raise
        return response


def _check_suited(request: ChatRequest) -> None:
    """Raise ContextFork if a request uses what only plain chat supports, or has a message of an unusual form."""
    if request.untrainable:
        raise ContextFork("untrainable")
    if not request.plain_tool_calls or not request.adds_logprobs:
        raise ContextFork("unsuited_field")
    for name, neutral in _UNSUITED.items():
        if name in request.fields and request_body.value(request.fields, name) not in (None, neutral):
            raise ContextFork("unsuited_field")
    if request.stream_options.get("continuous_usage_stats"):
        raise ContextFork("unsuited_field")


def _place(keys: Sequence[str], leaf: Leaf) -> int:
    """Return the index of the answer that is continued. Raises ContextFork."""
    for place in reversed(range(len(keys))):
        if short_key(keys[place]) == leaf.link_key:
            return place
    raise ContextFork("answer_not_found")


def _place_after_change(place: int, before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> int:
    """Return where the answer at `place` of the client's messages is in those for vLLM.

    Only messages of the system and the user were added, merged or replaced.
    """
    later: int = sum(message.get("role") == "assistant" for message in before[place + 1 :])
    return [n for n, message in enumerate(after) if message.get("role") == "assistant"][-1 - later]


def _max_tokens(request: ChatRequest) -> int | None:
    """Return the client's limit of completion tokens."""
    for name in ("max_completion_tokens", "max_tokens"):
        if (limit := lax_values.lax_int(request_body.value(request.fields, name))) is not None:
            return limit
    return None
