"""Turns the deltas of a chat answer into content blocks, one open at a time, for Responses and Messages.

A block is reasoning, a text, a refusal or one tool call. A delta of another kind, or of another tool call, closes the
open block first, but not a tool call whose arguments are incomplete: what comes in between waits until they are, or
until the answer ends. A tool call is opened when its name is known and its arguments have started. A subclass renders
each step. An answer that did not stream is fed as one delta.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from ratchet.proxy.errors import ProxyError, UpstreamDisconnected
from ratchet.proxy.wire.capture import Capture
from ratchet.proxy.wire.tool_calls import StreamedToolCall, ToolCalls

Event = dict[str, Any]

_object = msgspec.json.Decoder(dict[str, Any])
_encode = msgspec.json.Encoder().encode


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class TokenCounts(msgspec.Struct, frozen=True):
    """The token counts of an answer, as vLLM reports them."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None

    @property
    def cached(self) -> int:
        """The tokens of the prompt that came from the cache."""
        return (self.prompt_tokens_details and self.prompt_tokens_details.cached_tokens) or 0

    @property
    def thought(self) -> int:
        """The tokens of the answer that are reasoning."""
        return (self.completion_tokens_details and self.completion_tokens_details.reasoning_tokens) or 0


class Kind(StrEnum):
    """What a block holds."""

    REASONING = "thought"
    TEXT = "text"
    REFUSAL = "refusal"  # a text in which the model says that it refuses, from a server that marks it
    CALL = "call"


@dataclass(slots=True, eq=False)
class Block:
    """One block; `place` counts those that were opened. `call` is set if it is a tool call."""

    kind: Kind
    call: StreamedToolCall | None = None
    place: int = -1
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)  # of a text block, if the client requested them

    @property
    def id(self) -> str:
        """The id of a tool call; a generated one if the server sent none."""
        return (self.call.id or f"call_{self.call.index}") if self.call else ""

    @property
    def name(self) -> str:
        """The name of a tool call."""
        return self.call.name if self.call else ""

    @property
    def text(self) -> str:
        """The content so far; of a tool call its arguments."""
        return "".join(self.pieces)

    @property
    def may_open(self) -> bool:
        """Whether its beginning is known."""
        return self.call is None or self.call.has_started

    @property
    def may_close(self) -> bool:
        """Whether another block may follow it before the answer has ended."""
        return self.call is None or self.call.is_complete()


class BlockRenderer(ABC):
    """Renders one answer (the first choice) as events, and at the end as one object."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.finish_reason: str | None = None
        self.stop: str | None = None  # the stop string that was hit
        self.usage: TokenCounts | None = None
        self.sampled: list[dict[str, Any]] = []  # the logprobs of the chunk, if the client requested them
        self._started = False
        self._open: Block | None = None
        self._waiting: list[Block] = []  # to be opened, in order
        self._tools = ToolCalls()
        self._calls: dict[StreamedToolCall, Block] = {}

    @property
    def is_refused(self) -> bool:
        """Whether the model refused to answer, or a filter of the server ended the answer."""
        return self.finish_reason == "content_filter" or any(block.kind == Kind.REFUSAL for block in self.blocks)

    def feed(self, chunk: dict[str, Any]) -> list[Event]:
        """Return the events of one chat chunk.

        Raises UpstreamDisconnected for more of a tool call that was complete, ValidationError for a usage that is none.
        """
        events = self._begin()
        self.usage = msgspec.convert(chunk.get("usage"), TokenCounts | None) or self.usage
        for choice in chunk.get("choices", ())[:1]:
            delta = choice.get("delta") or {}
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            self.sampled = (choice.get("logprobs") or {}).get("content") or []
            if isinstance(choice.get("stop_reason"), str):
                self.stop = choice["stop_reason"]
            if thought := delta.get("reasoning") or delta.get("reasoning_content"):
                events += self._grow(Kind.REASONING, thought)
            text = delta.get("content")
            if text:
                events += self._grow(Kind.TEXT, text)
            if refusal := delta.get("refusal"):
                events += self._grow(Kind.REFUSAL, refusal)
            if self.sampled and (last := self._last) is not None and last.kind == Kind.TEXT:
                last.logprobs += self.sampled
            for part in delta.get("tool_calls") or ():
                events += self._call(part)
        return events

    def finish(self) -> list[Event]:
        """Return the events that end a complete answer."""
        return [*self._begin(), *self._advance(ending=True), *self._close(), *self.ended()]

    def fail(self, error: ProxyError) -> list[Event]:
        """Return the events that end an answer that failed."""
        return [*self._begin(), *self.failed(error)]

    def _begin(self) -> list[Event]:
        if self._started:
            return []
        self._started = True
        return self.started()

    @property
    def _last(self) -> Block | None:
        return self._waiting[-1] if self._waiting else self._open

    def _grow(self, kind: Kind, piece: str) -> list[Event]:
        block = self._last
        if block is None or block.kind != kind:
            block = Block(kind)
        return self._add(block, piece)

    def _call(self, part: dict[str, Any]) -> list[Event]:
        call, piece = self._tools.add(part)
        block = self._calls.get(call)
        if block is None:
            block = self._calls[call] = Block(Kind.CALL, call)
        return self._add(block, piece)

    def _add(self, block: Block, piece: str) -> list[Event]:
        """Add a piece to a block, which may be new."""
        if piece:
            block.pieces.append(_text(piece))
        if block is self._open:
            grown = self.grew(block, piece) if piece else []
            return [*grown, *self._advance()]
        if block.place >= 0:
            if piece.strip():
                raise UpstreamDisconnected(f"the upstream continued the tool call {block.id!r}, which was complete")
            return []
        if block not in self._waiting:
            self._waiting.append(block)
        return self._advance()

    def _advance(self, *, ending: bool = False) -> list[Event]:
        """Open the blocks that may follow; all of them at the end of the answer."""
        events: list[Event] = []
        while self._waiting and (ending or (self._waiting[0].may_open and (not self._open or self._open.may_close))):
            events += self._start(self._waiting.pop(0))
        return events

    def _start(self, block: Block) -> list[Event]:
        events = self._close()
        block.place = len(self.blocks)
        self.blocks.append(block)
        self._open = block
        events += self.opened(block)
        if block.pieces:
            sampled = self.sampled
            self.sampled = block.logprobs or sampled  # those of a block that waited
            events += self.grew(block, block.text)
            self.sampled = sampled
        return events

    def _close(self) -> list[Event]:
        block, self._open = self._open, None
        return self.closed(block) if block else []

    @abstractmethod
    def started(self) -> list[Event]:
        """Return the events for the start of the answer."""

    @abstractmethod
    def opened(self, block: Block) -> list[Event]:
        """Return the events for a new block."""

    @abstractmethod
    def grew(self, block: Block, piece: str) -> list[Event]:
        """Return the events for more content in a block."""

    @abstractmethod
    def closed(self, block: Block) -> list[Event]:
        """Return the events for a complete block."""

    @abstractmethod
    def ended(self) -> list[Event]:
        """Return the events for a complete answer."""

    @abstractmethod
    def failed(self, error: ProxyError) -> list[Event]:
        """Return the events for an answer that failed."""

    @abstractmethod
    def answer(self) -> dict[str, Any]:
        """Return the complete answer, for clients that do not stream."""


class BlockEncoder:
    """The response encoder of a dialect with a renderer."""

    __slots__ = ("_renderer", "capture")

    def __init__(self, capture: Capture, renderer: BlockRenderer) -> None:
        self.capture = capture
        self._renderer = renderer

    def whole(self, body: bytes) -> bytes:
        """Encode a response that did not stream. Raises UpstreamDisconnected."""
        answer = _object.decode(self.capture.whole(body))
        try:
            self._renderer.feed({"usage": answer.get("usage"), "choices": [message_to_delta(answer["choices"][0])]})
        except (msgspec.ValidationError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise UpstreamDisconnected(f"the upstream's answer is not a chat completion: {error}") from error
        if (cut := self.capture.cut()) is not None:
            raise cut
        self._renderer.finish()
        return _encode(self._renderer.answer())

    def chunk(self, data: bytes) -> bytes | None:
        """Return the client's events for one streamed chunk. Raises UpstreamDisconnected for an invalid one."""
        chunk = self.capture.chunk(data)
        if chunk is None or self.capture.error:
            return None
        if self.capture.unread:
            raise UpstreamDisconnected(f"the upstream's stream cannot be rendered: {self.capture.unread}")
        try:
            return _events(self._renderer.feed(_object.decode(chunk)))
        except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise UpstreamDisconnected(f"the upstream sent a chunk that cannot be read: {error}") from error

    def end(self) -> bytes:
        """Return the events that end the stream: as failed, if the engine did not complete its answer."""
        cut = self.capture.cut()
        return _events(self._renderer.finish()) if cut is None else self.failed(cut)

    def failed(self, error: ProxyError) -> bytes:
        """Return the events for a failure."""
        return _events(self._renderer.fail(error))


def _text(piece: Any) -> str:
    """Return the piece. Raises TypeError if it is not text."""
    if not isinstance(piece, str):
        raise TypeError(f"{str(piece)[:40]!r} is not text")
    return piece


def message_to_delta(choice: dict[str, Any]) -> dict[str, Any]:
    """Return the choice of a complete response as one chunk of a stream."""
    message = choice["message"]
    calls = [{**call, "index": place} for place, call in enumerate(message.get("tool_calls") or ())]
    content = message.get("content")
    if isinstance(content, list):  # some servers return parts
        content = "".join(part["text"] for part in content if part.get("type") == "text")
    return {**choice, "delta": {**message, "content": content, "tool_calls": calls}}


def _events(events: list[Event]) -> bytes:
    return b"".join(b"event: " + event["type"].encode() + b"\ndata: " + _encode(event) + b"\n\n" for event in events)
