"""POST /v1/messages: Anthropic's dialect, around an inner chat call."""

from __future__ import annotations

from typing import Any

import msgspec

from ratchet.proxy.dialects import anthropic_request, chat, inner_request
from ratchet.proxy.dialects.content_blocks import Block, BlockEncoder, BlockRenderer, Event, Kind, TokenCounts
from ratchet.proxy.dialects.dialect import ParsedRequest, parsed_request, policy_name, read_body_with
from ratchet.proxy.errors import ProxyError
from ratchet.proxy.wire.body_bounds import BodyBounds
from ratchet.proxy.wire.capture import Capture
from ratchet.proxy.wire.error_shapes import ANTHROPIC
from ratchet.store.records import CallStarted

_DELTAS = {
    Kind.REASONING: ("thinking_delta", "thinking"),
    Kind.TEXT: ("text_delta", "text"),
    Kind.REFUSAL: ("text_delta", "text"),
    Kind.CALL: ("input_json_delta", "partial_json"),
}


class Messages:
    """The Messages dialect."""

    name = "messages"
    path = chat.PATH
    shape = ANTHROPIC

    def __init__(self, bounds: BodyBounds) -> None:
        self._bounds = bounds

    async def read(self, body: bytes, key_id: str | None) -> ParsedRequest:
        """Parse a request. Raises BadRequest, BodyTooLarge."""
        return await read_body_with(_read, body, self._bounds)


def _read(body: bytes) -> ParsedRequest:
    request = anthropic_request.read(inner_request.decode(body))

    def make_encoder(start: CallStarted) -> BlockEncoder:
        capture = chat.make_capture(request, start)
        return BlockEncoder(capture, MessageRenderer(start, capture))

    return parsed_request(request, make_encoder)


class MessageRenderer(BlockRenderer):
    """Renders an answer as Anthropic's events."""

    def __init__(self, start: CallStarted, capture: Capture) -> None:
        super().__init__()
        self._id = "msg_" + start.call_id.removeprefix("call_")
        self._model = policy_name(start)
        self._capture = capture

    def started(self) -> list[Event]:
        """Return the start of the message; the prompt's length is known from its ids."""
        message = {**self.answer(), "usage": {**self._usage(), "input_tokens": self._capture.prompt_tokens}}
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def opened(self, block: Block) -> list[Event]:
        """Return the start of an empty block."""
        empty = {
            Kind.REASONING: {"type": "thinking", "thinking": "", "signature": ""},
            Kind.TEXT: _text(""),
            Kind.REFUSAL: _text(""),
            Kind.CALL: _tool_use(block, {}),
        }
        return [{"type": "content_block_start", "index": block.place, "content_block": empty[block.kind]}]

    def grew(self, block: Block, piece: str) -> list[Event]:
        """Return the delta of a block."""
        kind, field = _DELTAS[block.kind]
        return [{"type": "content_block_delta", "index": block.place, "delta": {"type": kind, field: piece}}]

    def closed(self, block: Block) -> list[Event]:
        """Return the end of a block; reasoning ends with a signature."""
        stop = {"type": "content_block_stop", "index": block.place}
        if block.kind != Kind.REASONING:
            return [stop]
        signed = {"type": "signature_delta", "signature": self._id}
        return [{"type": "content_block_delta", "index": block.place, "delta": signed}, stop]

    def ended(self) -> list[Event]:
        """Return the end of the message."""
        delta = {**self._stopped(), "stop_details": None, "container": None}
        return [{"type": "message_delta", "delta": delta, "usage": self._usage()}, {"type": "message_stop"}]

    def failed(self, error: ProxyError) -> list[Event]:
        """Return the error event."""
        return [msgspec.json.decode(ANTHROPIC.encode_error(error))]

    def answer(self) -> dict[str, Any]:
        """Return the message."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [self._content(block) for block in self.blocks],
            **self._stopped(),
            "stop_details": None,
            "container": None,
            "usage": self._usage(),
        }

    def _content(self, block: Block) -> dict[str, Any]:
        if block.kind == Kind.REASONING:
            return {"type": "thinking", "thinking": block.text, "signature": self._id}
        if block.kind == Kind.CALL:
            return _tool_use(block, _input(block.text))
        return _text(block.text)

    def _stopped(self) -> dict[str, Any]:
        reason = None
        if self.finish_reason == "length":
            reason = "max_tokens"
        elif any(block.kind == Kind.CALL for block in self.blocks) and self.finish_reason:
            reason = "tool_use"
        elif self.finish_reason and self.is_refused:
            reason = "refusal"
        elif self.stop is not None:
            reason = "stop_sequence"
        elif self.finish_reason:
            reason = "end_turn"
        return {"stop_reason": reason, "stop_sequence": self.stop if reason == "stop_sequence" else None}

    def _usage(self) -> dict[str, Any]:
        """Return the usage so far; `input_tokens` excludes cached tokens."""
        usage = self.usage or TokenCounts()
        return {
            "input_tokens": max((usage.prompt_tokens or 0) - usage.cached, 0),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached,
            "output_tokens": usage.completion_tokens or 0,
            "cache_creation": None,
            "inference_geo": None,
            "output_tokens_details": {"thinking_tokens": usage.thought},
            "server_tool_use": None,
            "service_tier": "standard",
        }


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "citations": []}


def _tool_use(block: Block, value: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": value, "caller": {"type": "direct"}}


def _input(arguments: str) -> dict[str, Any]:
    """Return a tool call's arguments as an object. Invalid JSON is wrapped, for the client to send it back."""
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {anthropic_request.UNREADABLE: arguments}
