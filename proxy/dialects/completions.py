"""POST /v1/completions: plain text in, plain text out, without what the client did not request.

A prompt (text or token ids) is recorded as one message of the role `prompt`. A text that
contains an earlier answer continues it. Any other prompt starts a trajectory, unless the client names one.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from msgspec import Raw

from ratchet.proxy.dialects.chat import PassthroughEncoder
from ratchet.proxy.dialects.dialect import ParsedRequest, policy_name, read_body_with
from ratchet.proxy.errors import BadRequest
from ratchet.proxy.wire import lax_values, request_body
from ratchet.proxy.wire.body_bounds import BodyBounds
from ratchet.proxy.wire.capture import Capture, SampledChoice
from ratchet.proxy.wire.error_shapes import OPENAI
from ratchet.proxy.wire.request_body import ChatRequest
from ratchet.store.content import messages as canon
from ratchet.store.records import OTHER

PATH = "/v1/completions"


class Completions:
    """The Completions dialect."""

    name = "completions"
    path = PATH
    shape = OPENAI

    def __init__(self, bounds: BodyBounds) -> None:
        self._bounds = bounds

    async def read(self, body: bytes, key_id: str | None) -> ParsedRequest:
        """Parse a request. Raises BadRequest, BodyTooLarge."""
        return await read_body_with(_read, body, self._bounds)


class CompletionsRequest(ChatRequest):
    """A request with a prompt instead of messages; its `logprobs` is a number."""

    is_chat: ClassVar[bool] = False

    echoes: bool = False  # the response repeats the prompt

    def outgoing(self, served_name: str) -> bytes:
        """Return the body for vLLM, with the served model, requesting ids, logprobs and usage.

        vLLM cannot echo the prompt and return ids; a call that echoes is not trained, so its fields stay unchanged.
        """
        fields = {**self.fields, "model": Raw(msgspec.json.encode(served_name))}
        if not self.echoes:
            fields["return_token_ids"] = Raw(b"true")
        if self.adds_logprobs and not self.echoes and not self.asks_logprobs:
            fields["logprobs"] = Raw(b"0")
        if self.streamed:
            fields["stream_options"] = Raw(msgspec.json.encode({**self.stream_options, "include_usage": True}))
        return msgspec.json.encode(fields)


class _TextLogprobs(msgspec.Struct):
    token_logprobs: list[float | None] = []


_logprobs = msgspec.json.Decoder(_TextLogprobs | None)


class CompletionsCapture(Capture):
    """The capture of a text completion; vLLM puts the prompt's ids into each choice."""

    _PIECE: ClassVar = ("text", Raw(b'""'))

    def _capture_choice(self, fields: dict[str, Raw]) -> SampledChoice:
        if "prompt_token_ids" in fields:
            self._capture_prompt(fields["prompt_token_ids"])
        return super()._capture_choice(fields)

    def _message(self, fields: dict[str, Raw]) -> dict[str, Any]:
        return {"role": "assistant", "content": msgspec.json.decode(fields["text"], type=str)}

    def _add_choice(self, choice: SampledChoice, fields: dict[str, Raw]) -> bool:
        text = msgspec.json.decode(fields["text"], type=str)
        choice.add_delta({"content": text})
        return bool(text) or choice.finish_reason is not None

    def _sampled(self, logprobs: Raw) -> list[float]:
        found = _logprobs.decode(logprobs)
        return [value for value in found.token_logprobs if value is not None] if found else []


def _read(body: bytes) -> ParsedRequest:
    fields = request_body.fields_of(body)
    model = request_body.model_in(fields)
    if "prompt" not in fields and "prompt_embeds" not in fields:
        raise BadRequest("`prompt` is missing", param="prompt")
    prompt = request_body.value(fields, "prompt")
    several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    streamed, options = request_body.stream_in(fields)
    message = {"role": "prompt", "content": prompt}
    request = CompletionsRequest(
        fields=fields,
        model=model,
        messages=[message],
        streamed=streamed,
        asks_ids=request_body.is_true(fields, "return_token_ids"),
        asks_logprobs=request_body.value(fields, "logprobs") is not None,
        asks_usage=lax_values.lax_bool(options.get("include_usage")) is True,
        stream_options=options,
        sampling=request_body.sampling_in(fields),
        trajectory=request_body.trajectory_in(fields),
        user=request_body.user_in(fields),
        untrainable="several_prompts" if several else request_body.untrainable_by(fields),
        echoes=request_body.is_true(fields, "echo"),
    )
    node = canon.node(canon.ROOT, message)
    return ParsedRequest(
        request=request,
        nodes=(node,),
        hashes=(node.hash,),
        keys=canon.link_keys([message]),
        make_encoder=lambda start: PassthroughEncoder(
            CompletionsCapture(
                policy_name(start),
                asks_ids=request.asks_ids,
                asks_logprobs=request.asks_logprobs,
                asks_usage=request.asks_usage,
                lenient=start.purpose == OTHER,
            )
        ),
    )
