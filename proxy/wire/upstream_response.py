"""What an upstream's answer is to those who read it, whoever made it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Protocol


class UpstreamResponse(Protocol):
    """An answer at its headers, whose body may still be coming. Header names are looked up in lower case."""

    url: str
    status: int
    headers: Mapping[str, str]

    async def read(self) -> bytes:
        """Return the whole body. Raises UpstreamError."""

    def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes. Raises UpstreamError where it breaks off."""

    def close(self) -> None:
        """Let go of the answer; where its end has not come, the upstream notices at once. May be called again."""
