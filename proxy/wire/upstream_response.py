"""An upstream's response as its readers see it, and the parser of the server-sent events in it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Protocol

from ratchet.proxy.errors import UpstreamDisconnected

DONE = b"[DONE]"
_MAX_EVENT_BYTES = 64 * 2**20


class UpstreamResponse(Protocol):
    """A response whose body may still be arriving. Header names are in lower case."""

    url: str
    status: int

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers."""

    async def read(self) -> bytes:
        """Return the whole body. Raises UpstreamError."""

    def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Raises UpstreamError if it breaks off."""

    def close(self) -> None:
        """Release the response; an incomplete one is aborted, which the upstream notices at once. Idempotent."""


class SseParser:
    """Splits a byte stream into server-sent events. Pieces may end anywhere; only complete events come out.

    Each byte is searched once, however many pieces an event has.
    """

    def __init__(self) -> None:
        self._rest = bytearray()  # of an event that is not complete
        self._ends_with_return = False  # the last piece: a line feed may follow

    def feed(self, piece: bytes) -> Iterator[tuple[bytes | None, bytes]]:
        """Yield (data, raw) for every event that `piece` completes; data is None for comments.

        `raw` is the event with its blank line, to be passed on unchanged. Raises UpstreamDisconnected for an event
        without end.
        """
        if self._ends_with_return:
            piece = b"\r" + piece
        if b"\r" in piece:
            self._ends_with_return = piece.endswith(b"\r")
            piece = piece.removesuffix(b"\r").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if self._rest.endswith(b"\n"):
            piece = b"\n" + piece
            self._rest.pop()
        *blocks, rest = piece.split(b"\n\n")
        if blocks:
            if self._rest:
                blocks[0] = bytes(self._rest) + blocks[0]
            self._rest = bytearray(rest)
        else:
            self._rest += rest
        if len(self._rest) > _MAX_EVENT_BYTES:
            raise UpstreamDisconnected(f"the upstream sent an event of more than {_MAX_EVENT_BYTES} bytes")
        for block in blocks:
            yield _data(block), block + b"\n\n"


def _data(block: bytes) -> bytes | None:
    if block.startswith(b"data: ") and b"\n" not in block:
        return block[6:]
    lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
