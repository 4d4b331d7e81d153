"""TrajectoryBehavior: a few numbers about a trajectory, computed once from its transcript. Pure.

A hallucinated argument is a value of a tool call that occurs nowhere in the model's context before it. An identifier (a
word with digits, @, / or _) must occur as a whole; of several words one must. Short numbers, booleans and words from
the tool's own description are not checked: they are choices, not claims.

Reasoning is the text beside tool calls, in reasoning fields and in <think>. Engines do not attribute tokens, so its
tokens are estimated as the sampled tokens times its share of the characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ratchet.store.records import Transcript
from ratchet.trainer.controller.sentinel.resources import names_in

_MAX_CONTEXT_CHARS = 2_000_000  # of a trajectory; later calls are not checked
_MAX_ARGUMENTS = 200  # of a trajectory
_MAX_VALUE_CHARS = 2_000
_WORD = re.compile(r"\w{3,}")
_IDENTIFIER = re.compile(r"\S*[\d@/_]\S*")
_THINK = re.compile(r"<think>(.*?)(?:</think>|$)", re.DOTALL)
_REASONING = ("reasoning_content", "reasoning")


@dataclass(frozen=True, slots=True)
class TrajectoryBehavior:
    """Numbers about a trajectory. An action is a tool call or a text answer."""

    trajectory_id: str
    family: str
    cohort: str
    sampled_tokens: int
    reasoning_tokens: float
    actions: int
    tool_calls: int
    arguments: int  # that were checked
    hallucinated: int  # of those
    offered: frozenset[str]  # tools
    used: frozenset[str]
    shown: frozenset[str] = frozenset()  # files, addresses and ids in its input
    opened: frozenset[str] = frozenset()  # resources that its tool calls named


def read_behavior(member: Transcript) -> TrajectoryBehavior:
    """Return the behavior of a trajectory."""
    checked, hallucinated = _count_arguments(member)
    answers = [message for message in member.messages if message.get("role") == "assistant"]
    calls = [call for message in answers for call in _tool_calls(message)]
    tokens = sum(call.completion_tokens for call in member.calls)
    reasoning, other = (sum(map(size, answers)) for size in (_reasoning_chars, _other_chars))
    offered = frozenset(filter(None, (_name(tool) for tool in member.tools)))
    return TrajectoryBehavior(
        trajectory_id=member.trajectory.id,
        family=member.trajectory.family,
        cohort=member.trajectory.group_key,
        sampled_tokens=tokens,
        reasoning_tokens=tokens * reasoning / max(1, reasoning + other),
        actions=len(calls) + sum(not _tool_calls(message) for message in answers),
        tool_calls=len(calls),
        arguments=checked,
        hallucinated=hallucinated,
        offered=offered,
        used=frozenset(_name(call) for call in calls) & offered,
        shown=names_in(_content(message) for message in member.messages if message.get("role") != "assistant"),
        opened=names_in(value for call in calls for value in _values(_function(call).get("arguments"))),
    )


def _count_arguments(member: Transcript) -> tuple[int, int]:
    """Return how many argument values were checked, and how many of them were hallucinated."""
    context = json.dumps(member.tools, ensure_ascii=False, default=str).casefold()
    checked = hallucinated = 0
    for message in member.messages:
        for call in _tool_calls(message):
            for value in _values(_function(call).get("arguments")):
                found = occurs(value, context)
                if found is not None and checked < _MAX_ARGUMENTS:
                    checked, hallucinated = checked + 1, hallucinated + (not found)
        context += "\n" + json.dumps(message, ensure_ascii=False, default=str).casefold()
        if len(context) > _MAX_CONTEXT_CHARS:
            break
    return checked, hallucinated


def occurs(value: str, context: str) -> bool | None:
    """Whether an argument's value occurs in the (casefolded) context; None if that is meaningless."""
    value = value[:_MAX_VALUE_CHARS].casefold().strip()
    if _IDENTIFIER.fullmatch(value):
        return value in context if len(value) >= 3 else None
    words = _WORD.findall(value)
    return any(word in context for word in words) if words else None


def _values(arguments: Any) -> Iterator[str]:
    """Yield the texts and numbers of a tool call's arguments at any depth."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return
    pending = list(arguments.values()) if isinstance(arguments, Mapping) else []
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)
        elif isinstance(value, str | int | float) and not isinstance(value, bool):
            yield str(value)


def _tool_calls(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    calls = message.get("tool_calls") if message.get("role") == "assistant" else None
    return [call for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    return function if isinstance(function, Mapping) else tool


def _name(tool: Mapping[str, Any]) -> str:
    return str(_function(tool).get("name") or "")


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""


def _reasoning_chars(message: Mapping[str, Any]) -> int:
    fields = next((str(message[name]) for name in _REASONING if message.get(name)), "")
    content = _content(message)
    beside = len(content) if _tool_calls(message) else sum(map(len, _THINK.findall(content)))
    return len(fields) + beside


def _other_chars(message: Mapping[str, Any]) -> int:
    calls = sum(len(str(_function(call).get("arguments") or "")) + len(_name(call)) for call in _tool_calls(message))
    return calls + (0 if calls else len(_THINK.sub("", _content(message))))
