"""Images for judge models: described in the JSON prompt, and a limited number attached to it. Pure.

A data URL in a message is replaced by the image's type, size and hash, so that equal images stay recognizable. The
first `max_images` different ones are attached as content parts. Other URLs are unchanged and never opened.
"""

from __future__ import annotations

import binascii
import hashlib
from collections.abc import Mapping
from typing import Any

_MAX_CHARACTERS = 8_000_000  # of an attached image; larger ones are only described
_HASH = 12  # hex digits


class JudgeImages:
    """The images of one prompt: `describe` collects them, `content` attaches the first `max_images`."""

    def __init__(self, max_images: int) -> None:
        self._max_images = max_images
        self._attached: dict[str, str] = {}  # digest -> URL, in order

    def describe(self, value: Any) -> Any:
        """Return a JSON value in which descriptions replace the images."""
        if isinstance(value, Mapping):
            url = _data_url(value)
            return self._describe_url(url) if url else {name: self.describe(part) for name, part in value.items()}
        return [self.describe(part) for part in value] if isinstance(value, list | tuple) else value

    def content(self, text: str) -> Any:
        """Return the content of a message: the text, followed by the attached images if there are any."""
        if not self._attached:
            return text
        parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
        for number, url in enumerate(self._attached.values(), 1):
            parts += [{"type": "text", "text": f"image {number}:"}, {"type": "image_url", "image_url": {"url": url}}]
        return parts

    def _describe_url(self, url: str) -> dict[str, Any]:
        head, _, data = url.partition(",")
        digest = hashlib.sha256(url.encode()).hexdigest()[:_HASH]
        if len(self._attached) < self._max_images and len(url) <= _MAX_CHARACTERS:
            self._attached.setdefault(digest, url)
        description: dict[str, Any] = {"type": "image", "media_type": head.removeprefix("data:").partition(";")[0]}
        description |= {"bytes": _size(data), "sha256": digest}
        return description | (
            {"shown_as": f"image {list(self._attached).index(digest) + 1}"} if digest in self._attached else {}
        )


def _data_url(part: Mapping[str, Any]) -> str | None:
    """Return the data URL of a content part that is an image, if it has one."""
    image = part.get("image_url") if part.get("type") == "image_url" else None
    url = image.get("url") if isinstance(image, Mapping) else image
    return url if isinstance(url, str) and url.startswith("data:") else None


def _size(data: str) -> int | None:
    """Return the number of bytes that base64 encodes; None if it is invalid."""
    try:
        return len(binascii.a2b_base64(data))
    except (binascii.Error, ValueError):
        return None
