"""A dialect: how its requests are parsed and its responses encoded.

Every dialect makes one inner call to vLLM, with token ids and logprobs. `read` returns that call with a
`ResponseEncoder`, which converts vLLM's response to the client's format piece by piece and captures it on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from ratchet.proxy.errors import BadRequest, ProxyError
from ratchet.proxy.runtime.thread_pools import run_parsing
from ratchet.proxy.wire.body_bounds import BodyBounds
from ratchet.proxy.wire.capture import Capture
from ratchet.proxy.wire.error_shapes import ErrorShape
from ratchet.proxy.wire.request_body import ChatRequest
from ratchet.proxy.wire.unreadable_text import unreadable_body
from ratchet.store.records import CallStarted, MessageNode

LARGE = 256 * 1024  # bytes; larger bodies are parsed in a thread

_Read = TypeVar("_Read")


class ResponseEncoder(Protocol):
    """Encodes one response in the client's format. It returns complete bodies and complete events only."""

    @property
    def capture(self) -> Capture:
        """The capture of what vLLM sampled."""

    def whole(self, body: bytes) -> bytes:
        """Encode a response that did not stream. Raises UpstreamDisconnected."""

    def chunk(self, data: bytes) -> bytes | None:
        """Return the client's events for one streamed chunk, None if it has nothing for the client."""

    def end(self) -> bytes:
        """Return the events that end a stream. They are sent once the call is durable."""

    def failed(self, error: ProxyError) -> bytes:
        """Return the events for a failure in mid-stream."""


class StorableRequest(msgspec.Struct, frozen=True):
    """The part of a request that may be stored. `redacted`: some of its content was removed."""

    nodes: tuple[MessageNode, ...]
    tools_hash: str
    tools: bytes
    sampling: Mapping[str, Any]
    redacted: bool


class ParsedRequest(msgspec.Struct):
    """A parsed request: the inner call, its messages as nodes, and their link keys.

    `storable` is set if redaction applies.
    """

    request: ChatRequest
    nodes: Sequence[MessageNode]
    hashes: tuple[str, ...]  # of the nodes
    keys: tuple[str, ...]
    make_encoder: Callable[[CallStarted], ResponseEncoder]
    storable: StorableRequest | None = None

    @property
    def prompt_node(self) -> str:
        """The hash of the whole prompt."""
        return self.hashes[-1] if self.hashes else ""


class Dialect(Protocol):
    """One HTTP API for agents."""

    @property
    def name(self) -> str:
        """The name in the records."""

    @property
    def path(self) -> str:
        """vLLM's route for the inner call."""

    @property
    def shape(self) -> ErrorShape:
        """The format of errors."""

    async def read(self, body: bytes, key_id: str | None) -> ParsedRequest:
        """Parse a request within the bounds. Raises ProxyError."""


def parsed_request(request: ChatRequest, make_encoder: Callable[[CallStarted], ResponseEncoder]) -> ParsedRequest:
    """Return a chat request with the nodes and link keys of its messages."""
    return ParsedRequest(request, request.nodes, request.hashes, request.keys, make_encoder)


def policy_name(start: CallStarted) -> str:
    """Return the model name for the client."""
    return start.policy


async def read_body_with(read: Callable[[bytes], _Read], body: bytes, bounds: BodyBounds | None = None) -> _Read:
    """Return `read(body)` of a body within the bounds, computed in a thread if the body is large.

    Raises BodyTooLarge; BadRequest for an invalid body.
    """

    def read_checked(body: bytes) -> _Read:
        if bounds is not None:
            bounds.check(body)
        try:
            return read(body)
        except UnicodeDecodeError as error:
            raise unreadable_body(body, error) from error

    try:
        return await run_parsing(read_checked, body) if len(body) > LARGE else read_checked(body)
    except (TypeError, AttributeError, KeyError, ValueError, RecursionError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise BadRequest(f"the request has a field of the wrong type: {reason}") from error
