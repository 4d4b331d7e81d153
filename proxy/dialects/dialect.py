"""What a dialect is: how a request is read, and how its answer is worded.

Every dialect makes one inner call to vLLM, which carries token ids and logprobs. `read` gives that call; the
`ResponseEncoder`
that comes with it turns vLLM's answer into what the client expects, piece by piece, and captures it on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import msgspec

from ratchet.proxy.errors import BadRequest, ProxyError
from ratchet.proxy.runtime.thread_pools import run_parsing
from ratchet.proxy.wire.capture import Capture
from ratchet.proxy.wire.error_shapes import ErrorShape
from ratchet.proxy.wire.request_body import ChatRequest
from ratchet.store.records import CallStarted, MessageNode

LARGE = 256 * 1024  # bytes; larger bodies are read in a thread

_Read = TypeVar("_Read")


class ResponseEncoder(Protocol):
    """One answer in the client's words. Everything that it returns is whole: a body, or whole events."""

    @property
    def capture(self) -> Capture:
        """What vLLM sampled."""

    def whole(self, body: bytes) -> bytes:
        """Return the client's form of an answer that did not stream. Raises UpstreamDisconnected."""

    def chunk(self, data: bytes) -> bytes | None:
        """Return the client's events for one streamed chunk; nothing where the chunk holds nothing for it."""

    def end(self) -> bytes:
        """Return the events that end a stream; they are held back until the call is durable."""

    def failed(self, error: ProxyError) -> bytes:
        """Return the events that tell a failure in mid-stream."""


class StorableRequest(msgspec.Struct, frozen=True):
    """What may be written of a request. `redacted` says that something of its content may not."""

    nodes: tuple[MessageNode, ...]
    tools_hash: str
    tools: bytes
    sampling: Mapping[str, Any]
    redacted: bool


class ParsedRequest(msgspec.Struct):
    """A request that was understood: the inner call, its messages as nodes with their link keys, and its voice.

    `kept` is there where not all of it may be written.
    """

    request: ChatRequest
    nodes: tuple[MessageNode, ...]
    keys: tuple[str, ...]
    voice: Callable[[CallStarted], ResponseEncoder]
    storable: StorableRequest | None = None


class Dialect(Protocol):
    """One way of asking. `name` is what the record says, `path` is vLLM's route for the inner call."""

    @property
    def name(self) -> str:
        """The name in the records."""

    @property
    def path(self) -> str:
        """Where the inner call goes."""

    @property
    def shape(self) -> ErrorShape:
        """How errors are worded."""

    async def read(self, body: bytes, key_id: str | None) -> ParsedRequest:
        """Return what a request asks for. Raises ProxyError."""


def parsed_request(request: ChatRequest, voice: Callable[[CallStarted], ResponseEncoder]) -> ParsedRequest:
    """Return a chat request with the nodes and link keys of its messages."""
    return ParsedRequest(request, request.nodes, request.keys, voice)


def policy_name(start: CallStarted) -> str:
    """Return the name of the model that the client is told."""
    return start.policy


async def read_body_with(read: Callable[[bytes], _Read], body: bytes) -> _Read:
    """Return `read(body)`, in a thread where the body is large. Raises ProxyError, whatever is wrong in the body."""
    try:
        return await run_parsing(read, body) if len(body) > LARGE else read(body)
    except (TypeError, AttributeError, KeyError, ValueError, RecursionError) as error:
        said = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise BadRequest(f"the request has a field of the wrong kind: {said}") from error
