"""Server-sent events, read as they come. Bytes in any pieces go in; whole events come out. No I/O."""

from __future__ import annotations

from collections.abc import Iterator

from ratchet.proxy.errors import UpstreamDisconnected

DONE = b"[DONE]"
_MOST_BYTES = 64 * 2**20  # of one event


class SseParser:
    """Splits a byte stream into events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> Iterator[tuple[bytes | None, bytes]]:
        """Yield (data, raw) for every event that `piece` completes; data is None for comments.

        `raw` is the event's bytes with its blank line, for those who pass it on unchanged. Raises UpstreamDisconnected
        for an event without end.
        """
        if b"\r" in piece or self._rest.endswith(b"\r"):
            held = b"\r" if piece.endswith(b"\r") else b""
            text = (self._rest + piece[: len(piece) - len(held)]).replace(b"\r\n", b"\n").replace(b"\r", b"\n") + held
        else:
            text = self._rest + piece if self._rest else piece
        *whole, self._rest = text.split(b"\n\n")
        if len(self._rest) > _MOST_BYTES:
            raise UpstreamDisconnected(f"the upstream sent an event of more than {_MOST_BYTES} bytes")
        for block in whole:
            yield _data(block), block + b"\n\n"


def _data(block: bytes) -> bytes | None:
    if block.startswith(b"data: ") and b"\n" not in block:
        return block[6:]
    lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
