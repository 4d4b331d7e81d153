"""What judges are shown of a trajectory as JSON: tool outcomes, images, and as much as fits a budget. Pure."""

from __future__ import annotations

import binascii
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ratchet.store.records import ToolCall, Transcript

# The outcomes of a trajectory's tool calls, for judges and graders. Pure.


def tool_outcomes(member: Transcript) -> list[dict[str, Any]]:
    """Return one JSON object per used tool call, in order.

    `outcome` is the check of the call against the tools of its request; `result` is the result of the tool, None if the
    next request does not contain it. docs/tools.md lists both.
    """
    return [
        {
            "tool": one.tool,
            "tool_call_id": one.tool_call_id,
            "outcome": one.outcome.value,
            "detail": one.detail,
            "result": None if one.result is None else one.result.value,
        }
        for one in used_tool_calls(member)
    ]


def used_tool_calls(member: Transcript) -> Sequence[ToolCall]:
    """Return the tool calls of answers that the agent continued, and of calls that have no continuation."""
    followed: dict[str, set[int]] = {}
    for call in member.calls:
        if call.parent_call is not None:
            followed.setdefault(call.parent_call, set()).add(call.parent_choice)
    return [one for one in member.tool_calls if one.choice in followed.get(one.call_id, {one.choice})]


# Images for judge models: described in the JSON prompt, and a limited number attached to it. Pure.
#
# A data URL in a message is replaced by the image's type, size and hash, so that equal images stay recognizable. The
# first `max_images` different ones are attached as content parts. Other URLs are unchanged and never opened.

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
        description |= {"bytes": _decoded_size(data), "sha256": digest}
        return description | (
            {"shown_as": f"image {list(self._attached).index(digest) + 1}"} if digest in self._attached else {}
        )


def _data_url(part: Mapping[str, Any]) -> str | None:
    image = part.get("image_url") if part.get("type") == "image_url" else None
    url = image.get("url") if isinstance(image, Mapping) else image
    return url if isinstance(url, str) and url.startswith("data:") else None


def _decoded_size(data: str) -> int | None:
    """Return the number of bytes that base64 encodes; None if it is invalid."""
    try:
        return len(binascii.a2b_base64(data))
    except (binascii.Error, ValueError):
        return None


# Fits JSON values into a budget of bytes by leaving out what is in the middle, with a note. Pure.

_MIN_LENGTH = 200  # characters of a shortened text, before lists lose items
_MIN_BYTES = 100  # of a shortened list or object; with less it becomes text
_ENDS = 4  # items of a list that are kept if their own size allows it


def truncated_json(value: Any, budget: int) -> str:
    """Return a value as JSON of at most `budget` bytes of UTF-8; see `fitted`."""
    return msgspec.json.encode(fitted(value, budget)).decode()


def fitted(value: Any, budget: int) -> Any:
    """Return a JSON value of at most `budget` bytes, or the note alone if that is longer.

    The longest texts are shortened first, to 200 characters. Then lists keep the items at both ends, and the values of
    an object share the budget as in `fitted_each`. What is still too long becomes the text of its JSON, shortened.
    """
    if _size(value) <= budget:
        return value
    max_length = min(budget, max((len(part) for part in _texts(value)), default=0))
    shorter = value
    while max_length > _MIN_LENGTH:
        max_length = max(_MIN_LENGTH, max_length * 2 // 3)
        shorter = _shorten_texts(value, max_length)
        if _size(shorter) <= budget:
            return shorter
    if isinstance(shorter, list | tuple) and budget >= _MIN_BYTES:
        return _without_middle(shorter, budget)
    names = sum(_size(name) + 4 for name in shorter) if isinstance(shorter, Mapping) else budget
    if names > budget // 2 or budget < _MIN_BYTES:
        return _as_text(shorter, budget)
    return dict(zip(shorter, fitted_each(list(shorter.values()), budget - names), strict=True))


def fitted_each(values: Sequence[Any], budget: int) -> list[Any]:
    """Return the values, together of at most `budget` bytes; each has an equal share, and what one leaves the others
    divide.
    """
    sizes = [_size(value) for value in values]
    share = budget
    for place, size in enumerate(sorted(sizes)):
        share = budget // (len(sizes) - place)
        if size > share:
            break
        budget -= size
    return [value if size <= share else fitted(value, share) for value, size in zip(values, sizes, strict=True)]


def shortened(text: str, max_length: int) -> str:
    """Return a text of about `max_length` characters at most."""
    if len(text) <= max_length:
        return text
    half = max_length // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters left out ...] {text[len(text) - half :]}"


def _without_middle(items: Sequence[Any], budget: int) -> list[Any]:
    """Return a list's items from both ends and, as a text between them, a note of how many are left out."""
    if len(items) <= _ENDS:
        return fitted_each(items, budget - 2 - len(items))
    budget -= 40  # the note
    largest = budget // _ENDS
    first: list[Any] = []
    last: list[Any] = []
    for number in range(len(items)):
        ends, place = (last, -1 - len(last)) if number % 2 else (first, len(first))
        item = fitted(items[place], largest)
        budget -= _size(item) + 1
        if budget < 0:
            break
        ends.append(item)
    left_out = len(items) - len(first) - len(last)
    note = [f"[... {left_out} left out ...]"] if left_out else []
    return [*first, *note, *reversed(last)]


def _as_text(value: Any, budget: int) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    length = budget
    while length and _size(short := shortened(text, length)) > budget:
        length //= 2  # quotes and characters beyond ASCII have several bytes
    return short if length else shortened(text, 0)


def _size(value: Any) -> int:
    return len(msgspec.json.encode(value))


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [text for part in value for text in _texts(part)] if isinstance(value, list | tuple) else []


def _shorten_texts(value: Any, max_length: int) -> Any:
    if isinstance(value, str):
        return shortened(value, max_length)
    if isinstance(value, Mapping):
        return {name: _shorten_texts(part, max_length) for name, part in value.items()}
    return [_shorten_texts(part, max_length) for part in value] if isinstance(value, list | tuple) else value
