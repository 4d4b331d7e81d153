"""Decides, call by call, whether the exact ids are continued or plain chat answers, and sees to the one or the other.

    no answer of ours before it, or nothing to splice onto   plain chat
    the render begins with the held ids                       plain chat, which is exact by itself
    the render differs only in what we sampled                generate after the held ids, worded by derender
    any doubt                                                 plain chat, a fork; counted by reason
    any failure before the first words                        plain chat; counted by reason

Promises: the client is never worse off than without it: it gets an answer of the same form, and where this way fails
before the first words, the plain way is gone from the start.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial

from ratchet.proxy.coordinator.conversations.token_contexts import TokenContexts
from ratchet.proxy.coordinator.versions.policy_cache import PolicyCache
from ratchet.proxy.dialects.chat import PATH
from ratchet.proxy.errors import UpstreamError
from ratchet.proxy.exact import chat_templates
from ratchet.proxy.exact.chat_templates import Templates
from ratchet.proxy.exact.scale_out import (
    GENERATE,
    EndpointNotOffered,
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
from ratchet.proxy.runtime.thread_pools import run_parsing
from ratchet.proxy.telemetry.metrics import Metrics
from ratchet.proxy.upstreams.http_connection import HttpResponse
from ratchet.proxy.upstreams.replica_pool import Replica, ReplicaPool
from ratchet.proxy.upstreams.vllm_client import Upstream
from ratchet.proxy.wire import lax_values, request_body
from ratchet.proxy.wire.request_body import ChatRequest
from ratchet.proxy.wire.upstream_response import UpstreamResponse
from ratchet.proxy.worker.call.active_call import ActiveCall
from ratchet.proxy.worker.forwarding.forwarders import Forwarder

log = logging.getLogger("ratchet.proxy")

_LONG = 16_000  # ids; longer prompts are spliced off the event loop
_ASK_AGAIN = 300.0  # seconds until a replica without the endpoints is asked again
# What generate or derender would answer otherwise than plain chat does, with the value that asks for nothing odd.
_UNSUITED = {
    "add_generation_prompt": True, "continue_final_message": False, "echo": False, "include_reasoning": True,
    "include_stop_str_in_output": False, "return_prompt_text": False, "return_tokens_as_token_ids": False,
    "use_beam_search": False,
} | dict.fromkeys((
    "audio", "ec_transfer_params", "function_call", "functions", "kv_transfer_params", "logprob_token_ids",
    "mm_processor_kwargs", "prompt_logprobs", "truncate_prompt_tokens",
))  # fmt: skip


class ExactForwarder:
    """A forwarder that continues exact ids where it can, and leaves everything else to `plain`.

    `insisted`: a replica that does not offer it is told again and again.
    """

    def __init__(
        self,
        plain: Forwarder,
        policies: PolicyCache,
        upstream: Upstream,
        pool: ReplicaPool[Replica],
        contexts: TokenContexts,
        metrics: Metrics,
        *,
        insisted: bool,
    ) -> None:
        self._plain = plain
        self._policies = policies
        self._upstream = upstream
        self._pool = pool
        self._contexts = contexts
        self._metrics = metrics
        self._insisted = insisted
        self._scale_out = ScaleOut(upstream)
        self._templates = Templates(self._scale_out, upstream)
        self._paces: dict[str, StreamPacer] = {}
        self._without: dict[str, float] = {}  # replicas that do not offer it, and when to ask again

    async def forward(self, exchange: ActiveCall, path: str, headers: Mapping[str, str]) -> UpstreamResponse:
        """Send a call to `path` and return its answer; `exchange.url` says where it went. Raises UpstreamError."""
        leaf = exchange.opened.link.parent
        if path == PATH and leaf is not None:
            try:
                answer = await self._exact(exchange, leaf, headers)
            except ContextFork as fork:
                self._metrics.exact_splices.labels(fork.reason).inc()
            except UpstreamError as error:
                self._fell_back(exchange, error)
            except Exception as error:  # a defect here, or an answer of an odd form: plain chat knows nothing of it
                self._metrics.exact_fallbacks.labels("internal_error").inc()
                log.exception("event=exact_context_defect call=%s reason=%r", exchange.opened.begun.call_id, str(error))
            else:
                self._metrics.exact_splices.labels("undrifted" if answer is None else "spliced").inc()
                if answer is not None:
                    return answer
        return await self._plain.forward(exchange, path, headers)

    def _fell_back(self, exchange: ActiveCall, error: UpstreamError) -> None:
        self._metrics.exact_fallbacks.labels(error.code or "other").inc()
        if isinstance(error, EndpointNotOffered):
            url = self._replica(exchange)
            if url not in self._without or self._insisted:
                log.warning("event=exact_context_not_offered upstream=%s reason=%r", url, str(error))
            self._without[url] = time.monotonic() + _ASK_AGAIN
            self._contexts.shrink()
        else:
            log.warning("event=exact_context_failed call=%s reason=%r", exchange.opened.begun.call_id, str(error))

    def _replica(self, exchange: ActiveCall) -> str:
        return self._pool.order(exchange.opened.begun.trajectory_id)[0].url

    async def _exact(self, exchange: ActiveCall, leaf: Leaf, headers: Mapping[str, str]) -> UpstreamResponse | None:
        """Return the answer after the held ids; None where plain chat is exact. Raises ContextFork, UpstreamError."""
        wanted, begun, url = exchange.request, exchange.opened.begun, self._replica(exchange)
        _check_suited(wanted)
        if self._without.get(url, 0.0) > time.monotonic():
            raise ContextFork("not_offered")
        held = await self._contexts.find_context(leaf)
        if held is None:
            raise ContextFork("context_unknown")
        # A system prompt that was swapped in where the client sent none stands before all that it sent.
        place = _place(exchange.opened.keys, leaf) + len(wanted.messages) - len(exchange.opened.messages)
        body = wanted.outgoing_fields(self._policies.served_name(begun.alias, begun.version))
        rendered, spliced = await self._spliced(url, begun.alias, body, wanted, place, held)
        if spliced is None:
            return None
        in_text = wanted.asks_logprobs
        sent = generate_body(rendered, spliced.ids, wanted.fields, streamed=wanted.streamed, in_text=in_text)
        made = DerenderRequest.of(wanted, f"chatcmpl-{begun.call_id}", body, rendered, spliced.ids)
        ids = await self._generate(exchange, sent, headers)
        try:
            return await self._in_words(ids, wanted, made)
        except BaseException:
            ids.close()  # vLLM stops, and the replica is free again
            raise

    async def _spliced(
        self, url: str, alias: str, body: Fields, wanted: ChatRequest, place: int, held: Context
    ) -> tuple[Rendered, Spliced | None]:
        """Return the render, and the prompt in place of its own. Raises ContextFork, UpstreamError."""
        template = await self._templates.of(url, alias, body)
        if any(
            chat_templates.renders_text(said, template.spelled)
            for said in wanted.messages
            if said.get("role") == "assistant"
        ):
            raise ContextFork("turn_end_spelled")
        rendered = await self._scale_out.render(url, body)
        cut = partial(splice, held, rendered.ids, template.turn_end)
        spliced = await run_parsing(cut) if len(rendered.ids) > _LONG else cut()
        if spliced is not None:
            template.check_context_length(len(rendered.ids), len(spliced.ids), _limit(wanted))
            await self._templates.prove(template, url, body, wanted.messages, place, rendered, spliced.tail)
        return rendered, spliced

    async def _generate(self, exchange: ActiveCall, body: bytes, headers: Mapping[str, str]) -> HttpResponse:
        """Return generate's answer at its headers. Raises UpstreamError."""

        async def ask(replica: Replica) -> HttpResponse:
            exchange.url = replica.url
            return await self._upstream.post_json(replica.url, GENERATE, body, headers)

        answer = await self._pool.ask(exchange.opened.begun.trajectory_id, ask)
        if answer.status != 200:
            try:
                told = await answer.read()
            finally:
                answer.close()
            raise ScaleOutError(f"{GENERATE} answered {answer.status} {told[:300].decode('utf-8', 'replace')}")
        return answer

    async def _in_words(self, ids: HttpResponse, wanted: ChatRequest, made: DerenderRequest) -> UpstreamResponse:
        if not wanted.streamed:
            try:
                return await read_whole_response(self._scale_out, ids, made)
            finally:
                ids.close()
        answer = StreamedResponse(
            self._scale_out, ids, made, self._paces.setdefault(ids.url, StreamPacer()), self._metrics
        )
        try:
            await answer.begin()
        except BaseException:
            answer.close()
            raise
        return answer


def _check_suited(wanted: ChatRequest) -> None:
    """Raise Fork where a request asks for what only plain chat can do, which a message of an odd form is, too."""
    if wanted.untrainable:
        raise ContextFork("untrainable")
    if not all(
        chat_templates.has_plain_tool_calls(said) for said in wanted.messages if said.get("role") == "assistant"
    ):
        raise ContextFork("unsuited_field")
    for name, usual in _UNSUITED.items():
        if name in wanted.fields and request_body.value(wanted.fields, name) not in (None, usual):
            raise ContextFork("unsuited_field")
    if wanted.stream_options.get("continuous_usage_stats"):
        raise ContextFork("unsuited_field")


def _place(keys: Sequence[str], leaf: Leaf) -> int:
    """Return the place of the answer that is continued. Raises ContextFork."""
    if leaf.link_key not in keys:
        raise ContextFork("answer_not_found")
    return len(keys) - 1 - keys[::-1].index(leaf.link_key)


def _limit(wanted: ChatRequest) -> int | None:
    """Return how many tokens the client lets be generated."""
    for name in ("max_completion_tokens", "max_tokens"):
        if (limit := lax_values.lax_int(request_body.value(wanted.fields, name))) is not None:
            return limit
    return None
