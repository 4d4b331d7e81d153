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
    """Splits a byte stream into server-sent events. Pieces may end anywhere; only complete events come out."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> Iterator[tuple[bytes | None, bytes]]:
        """Yield (data, raw) for every event that `piece` completes; data is None for comments.

        `raw` is the event with its blank line, to be passed on unchanged. Raises UpstreamDisconnected for an event
        without end.
        """
        if b"\r" in piece or self._rest.endswith(b"\r"):
            pending = b"\r" if piece.endswith(b"\r") else b""
            text = (self._rest + piece[: len(piece) - len(pending)]).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            text += pending
        else:
            text = self._rest + piece if self._rest else piece
        *blocks, self._rest = text.split(b"\n\n")
        if len(self._rest) > _MAX_EVENT_BYTES:
            raise UpstreamDisconnected(f"the upstream sent an event of more than {_MAX_EVENT_BYTES} bytes")
        for block in blocks:
            yield _data(block), block + b"\n\n"


def _data(block: bytes) -> bytes | None:
    if block.startswith(b"data: ") and b"\n" not in block:
        return block[6:]
    lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
