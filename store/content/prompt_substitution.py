"""Puts a prompt in the place of a conversation's system prompt, or after it. Pure; changes nothing that it is given.

The system prompt is the first message, where its role is `system` or `developer`; where it is neither, one is added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ratchet.store.records.tuning import Prompt
from ratchet.store.states import PromptMode

_ROLES = ("system", "developer")

Message = Mapping[str, Any]


def has_system_prompt(messages: Sequence[Message]) -> bool:
    """Return whether a conversation begins with a system prompt."""
    return bool(messages) and messages[0].get("role") in _ROLES


def beginning(messages: Sequence[Message], mode: PromptMode, text: str) -> dict[str, Any]:
    """Return the message that a conversation begins with when `text` is swapped in."""
    if not has_system_prompt(messages):
        return {"role": "system", "content": text}
    first = messages[0]
    said = first.get("content")
    if mode is PromptMode.REPLACE or not said:
        return {**first, "content": text}
    if isinstance(said, str):
        return {**first, "content": f"{said}\n\n{text}"}
    return {**first, "content": [*said, {"type": "text", "text": text}]}


def with_prompt(messages: Sequence[Message], prompt: Prompt | None, family: str | None) -> tuple[Message, ...]:
    """Return a conversation as a prompt makes it for calls of a task family; without a text for them as it is."""
    text = prompt.text_for(family) if prompt else ""
    if prompt is None or not text:
        return tuple(messages)
    return (beginning(messages, prompt.mode, text), *messages[has_system_prompt(messages) :])
