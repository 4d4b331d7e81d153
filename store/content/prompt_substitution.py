"""Replaces a conversation's system prompt, or appends to it. Pure; does not modify its arguments.

The system prompt is a first message with the role `system` or `developer`; without one, a message is added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ratchet.store.content.messages import SYSTEM_ROLES
from ratchet.store.records.tuning import Prompt
from ratchet.store.states import PromptMode

Message = Mapping[str, Any]


def has_system_prompt(messages: Sequence[Message]) -> bool:
    """Return whether a conversation starts with a system prompt."""
    return bool(messages) and messages[0].get("role") in SYSTEM_ROLES


def beginning(messages: Sequence[Message], mode: PromptMode, text: str) -> dict[str, Any]:
    """Return the first message of a conversation that is served with `text`."""
    if not has_system_prompt(messages):
        return {"role": "system", "content": text}
    first = messages[0]
    content = first.get("content")
    if mode is PromptMode.REPLACE or not content:
        return {**first, "content": text}
    if isinstance(content, str):
        return {**first, "content": f"{content}\n\n{text}"}
    return {**first, "content": [*content, {"type": "text", "text": text}]}


def with_prompt(messages: Sequence[Message], prompt: Prompt | None, family: str | None) -> tuple[Message, ...]:
    """Return a conversation with the prompt's text for a task family; unchanged if there is none."""
    text = prompt.text_for(family) if prompt else ""
    if prompt is None or not text:
        return tuple(messages)
    return (beginning(messages, prompt.mode, text), *messages[has_system_prompt(messages) :])
