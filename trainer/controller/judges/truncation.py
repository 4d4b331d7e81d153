"""Texts cut to the room that there is in a language model's context: their middle goes, and that is said. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

_SHORTEST = 200  # characters that are left of a cut text


def fitted(value: Any, budget: int) -> str:
    """Return a value as JSON of at most `budget` characters: the longest texts in it are cut in their middle."""
    text = msgspec.json.encode(value).decode()
    longest = max((len(found) for found in _texts(value)), default=0)
    while len(text) > budget and longest > _SHORTEST:
        longest = max(_SHORTEST, longest * 2 // 3)
        text = msgspec.json.encode(_cut(value, longest)).decode()
    return text


def shortened(text: str, most: int) -> str:
    """Return about so many characters of a text at most."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters left out ...] {text[-half:]}"


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [text for part in value for text in _texts(part)] if isinstance(value, list | tuple) else []


def _cut(value: Any, longest: int) -> Any:
    if isinstance(value, str):
        return shortened(value, longest)
    if isinstance(value, Mapping):
        return {name: _cut(part, longest) for name, part in value.items()}
    return [_cut(part, longest) for part in value] if isinstance(value, list | tuple) else value
