"""What one answer does: it calls tools, asks a question in place of an action, refuses, or repeats itself. Pure.

Reads assistant messages in the form of Chat Completions. The words of refusals are English; a check compares two
versions on the same prompts, so text that only looks like a refusal or a question counts against neither.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

Message = Mapping[str, Any]

REASONING_FIELDS = ("reasoning_content", "reasoning")
THINK = re.compile(r"<think>(.*?)(?:</think>|$)", re.DOTALL)
_QUESTION_MARKS = ("?", "\uff1f", "\u061f")  # also full-width and Arabic
_CALL_MARKUP = ("<tool_call>", "</tool_call>", "<function=", "[TOOL_CALLS]", "<|tool_call", "<|python_tag|>")
_REFUSAL = re.compile(
    r"(?:i['\u2019]?m |i am )?(?:very |so |really )?(?:sorry|afraid)\b[^.!?\n]{0,40}\b"
    r"(?:can(?:no|['\u2019])t|can ?not|unable)"
    r"|(?:unfortunately,? )?i (?:can ?not|can['\u2019]t|am unable to|am not able to|won['\u2019]t be able to)\b"
    r"|i['\u2019]m (?:unable|not able) to\b"
    r"|as an ai\b",
    re.IGNORECASE,
)
_BEGINNING = 200  # characters that a refusal begins in
_REPEATED_CHARS = 1_000  # at the end of a text, in which repetition shows
_MIN_REPEATED_CHARS = 200
_MIN_COMPRESSION = 4.0  # prose compresses by 2 or less, a table by 3


def tool_calls_of(message: Message) -> Sequence[Mapping[str, Any]]:
    """Return the tool calls of an assistant message; none of any other."""
    calls = message.get("tool_calls") if message.get("role") == "assistant" else None
    return [call for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the function of a tool, or of a tool call."""
    function = tool.get("function")
    return function if isinstance(function, Mapping) else tool


def name_of(tool: Mapping[str, Any]) -> str:
    """Return the name of a tool, or of the tool that a call names; "" without one."""
    return str(function_of(tool).get("name") or "")


def text_of(message: Message) -> str:
    """Return the text of a message, without reasoning fields."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""


def is_empty(message: Message) -> bool:
    """Return whether an answer has neither text nor a tool call; reasoning alone is no answer."""
    return not tool_calls_of(message) and not THINK.sub("", text_of(message)).strip()


def is_refusal(message: Message) -> bool:
    """Return whether an answer begins with a refusal and calls no tool."""
    text = THINK.sub("", text_of(message)).strip()
    return not tool_calls_of(message) and _REFUSAL.search(text[:_BEGINNING]) is not None


def asks_in_place_of_acting(message: Message, offered: AbstractSet[str]) -> bool:
    """Return whether an answer's last line asks a question, with no tool call although tools were offered."""
    if not offered or tool_calls_of(message):
        return False
    lines = THINK.sub("", text_of(message)).strip().splitlines()
    return bool(lines) and any(mark in lines[-1] for mark in _QUESTION_MARKS)


def has_invalid_tool_call(message: Message, offered: AbstractSet[str]) -> bool:
    """Return whether an answer calls a tool that is not offered, with arguments that are no JSON object, or in text."""
    calls = tool_calls_of(message)
    if not calls:
        return bool(offered) and any(mark in text_of(message) for mark in _CALL_MARKUP)
    return any(name_of(call) not in offered or not _is_object(function_of(call).get("arguments")) for call in calls)


def repeats_itself(message: Message) -> bool:
    """Return whether the end of an answer, with its tool arguments and its reasoning, compresses as only loops do."""
    reasoning = next((str(message[name]) for name in REASONING_FIELDS if message.get(name)), "")
    arguments = "".join(str(function_of(call).get("arguments") or "") for call in tool_calls_of(message))
    end = (reasoning + text_of(message) + arguments)[-_REPEATED_CHARS:].encode()
    return len(end) >= _MIN_REPEATED_CHARS and len(end) >= _MIN_COMPRESSION * len(zlib.compress(end))


def _is_object(arguments: Any) -> bool:
    if arguments in ("", None):  # a call without arguments
        return True
    try:
        return isinstance(json.loads(arguments) if isinstance(arguments, str) else arguments, Mapping)
    except (ValueError, RecursionError):
        return False
