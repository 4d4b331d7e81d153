"""Shortens texts to a character budget by removing their middle, with a note. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

_MIN_LENGTH = 200  # characters of a shortened text


def truncated_json(value: Any, budget: int) -> str:
    """Return a value as JSON of at most `budget` characters; the longest texts in it are shortened."""
    text = msgspec.json.encode(value).decode()
    max_length = max((len(part) for part in _texts(value)), default=0)
    while len(text) > budget and max_length > _MIN_LENGTH:
        max_length = max(_MIN_LENGTH, max_length * 2 // 3)
        text = msgspec.json.encode(_shorten_texts(value, max_length)).decode()
    return text


def shortened(text: str, max_length: int) -> str:
    """Return a text of about `max_length` characters at most."""
    if len(text) <= max_length:
        return text
    half = max_length // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters left out ...] {text[-half:]}"


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
