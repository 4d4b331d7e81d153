"""The text of chat messages, whose content is a string or a list of parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def text_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of all messages, one after another."""
    contents = [message.get("content") or "" for message in messages]
    return "\n".join(
        content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        for content in contents
    )
