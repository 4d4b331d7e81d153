"""Images before a judge model: described in the JSON that it reads, and a bounded number shown beside it. Pure.

An image that lies in a message itself (a data URL) is never left in the JSON, where it would be a million letters
without meaning: there it is told by kind, size and hash, so that equal images stay equal. The first ones, each once,
are shown as the API's own parts where the judge is told to look at images. An address is left as it is: nobody here
opens it.
"""

from __future__ import annotations

import binascii
import hashlib
from collections.abc import Mapping
from typing import Any

_MOST_CHARACTERS = 8_000_000  # of one image that is shown; a larger one is described
_HASH = 12  # hex digits


class JudgeImages:
    """The images of one question: `described` collects them, `content` shows the first `most` of them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._shown: dict[str, str] = {}  # digest -> URL, in order

    def described(self, value: Any) -> Any:
        """Return a JSON value with every image in it described."""
        if isinstance(value, Mapping):
            url = _data_url(value)
            return self._told(url) if url else {name: self.described(part) for name, part in value.items()}
        return [self.described(part) for part in value] if isinstance(value, list | tuple) else value

    def content(self, text: str) -> Any:
        """Return a message's content: the text, with the images after it where there are any to show."""
        if not self._shown:
            return text
        parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
        for number, url in enumerate(self._shown.values(), 1):
            parts += [{"type": "text", "text": f"image {number}:"}, {"type": "image_url", "image_url": {"url": url}}]
        return parts

    def _told(self, url: str) -> dict[str, Any]:
        head, _, data = url.partition(",")
        digest = hashlib.sha256(url.encode()).hexdigest()[:_HASH]
        if len(self._shown) < self._most and len(url) <= _MOST_CHARACTERS:
            self._shown.setdefault(digest, url)
        told: dict[str, Any] = {"type": "image", "media_type": head.removeprefix("data:").partition(";")[0]}
        told |= {"bytes": _size(data), "sha256": digest}
        return told | ({"shown_as": f"image {list(self._shown).index(digest) + 1}"} if digest in self._shown else {})


def _data_url(part: Mapping[str, Any]) -> str | None:
    """Return the data URL of a chat content part that is an image."""
    held = part.get("image_url") if part.get("type") == "image_url" else None
    url = held.get("url") if isinstance(held, Mapping) else held
    return url if isinstance(url, str) and url.startswith("data:") else None


def _size(data: str) -> int | None:
    """Return how many bytes base64 holds; None where it is none."""
    try:
        return len(binascii.a2b_base64(data))
    except (binascii.Error, ValueError):
        return None
