"""TrajectoryBehavior: what a trajectory did, in a few numbers, read once off its transcript. Pure.

Made-up arguments: a value of a tool call that occurs nowhere in what the model had before it. An identifier (digits,
@, / or _ in one word) must occur whole; of several words one must. Short numbers, booleans and words that the tool's
own description offers are not judged: they are choices, not claims.

Reasoning: what was said beside tool calls, in reasoning fields and in <think>; its tokens are the sampled tokens times
its share of the characters, since engines do not tell which token belongs to what.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ratchet.store.records import Transcript
from ratchet.trainer.controller.sentinel.resources import names_in

_CONTEXT_CHARS = 2_000_000  # of a trajectory; what comes after it is not judged
_ARGUMENTS = 200  # of a trajectory
_VALUE_CHARS = 2_000
_WORD = re.compile(r"\w{3,}")
_IDENTIFIER = re.compile(r"\S*[\d@/_]\S*")
_THINK = re.compile(r"<think>(.*?)(?:</think>|$)", re.DOTALL)
_REASONING = ("reasoning_content", "reasoning")


@dataclass(frozen=True, slots=True)
class TrajectoryBehavior:
    """What a trajectory did. An action is a tool call or an answer in words."""

    trajectory_id: str
    family: str
    cohort: str
    sampled_tokens: int
    reasoning_tokens: float
    actions: int
    tool_calls: int
    arguments: int  # that were judged
    made_up: int  # of those
    offered: frozenset[str]  # tools
    used: frozenset[str]
    shown: frozenset[str] = frozenset()  # files, addresses and ids in what it was told
    opened: frozenset[str] = frozenset()  # those that its tool calls named


def conduct(member: Transcript) -> TrajectoryBehavior:
    """Return the conduct of a trajectory."""
    judged, made_up = _arguments(member)
    said = [message for message in member.messages if message.get("role") == "assistant"]
    calls = [call for message in said for call in _tool_calls(message)]
    tokens = sum(call.completion_tokens for call in member.calls)
    reasoning, other = (sum(map(size, said)) for size in (_reasoning_chars, _other_chars))
    offered = frozenset(filter(None, (_named(tool) for tool in member.tools)))
    return TrajectoryBehavior(
        trajectory_id=member.trajectory.id,
        family=member.trajectory.family,
        cohort=member.trajectory.group_key,
        sampled_tokens=tokens,
        reasoning_tokens=tokens * reasoning / max(1, reasoning + other),
        actions=len(calls) + sum(not _tool_calls(message) for message in said),
        tool_calls=len(calls),
        arguments=judged,
        made_up=made_up,
        offered=offered,
        used=frozenset(_named(call) for call in calls) & offered,
        shown=names_in(_content(message) for message in member.messages if message.get("role") != "assistant"),
        opened=names_in(value for call in calls for value in _values(_function(call).get("arguments"))),
    )


def _arguments(member: Transcript) -> tuple[int, int]:
    """Return how many argument values were judged, and how many of them were made up."""
    known = json.dumps(member.tools, ensure_ascii=False, default=str).casefold()
    judged = made_up = 0
    for message in member.messages:
        for call in _tool_calls(message):
            for value in _values(_function(call).get("arguments")):
                found = occurs(value, known)
                if found is not None and judged < _ARGUMENTS:
                    judged, made_up = judged + 1, made_up + (not found)
        known += "\n" + json.dumps(message, ensure_ascii=False, default=str).casefold()
        if len(known) > _CONTEXT_CHARS:
            break
    return judged, made_up


def occurs(value: str, context: str) -> bool | None:
    """Whether an argument's value occurs in the (casefolded) context; None where that says nothing."""
    value = value[:_VALUE_CHARS].casefold().strip()
    if _IDENTIFIER.fullmatch(value):
        return value in context if len(value) >= 3 else None
    words = _WORD.findall(value)
    return any(word in context for word in words) if words else None


def _values(arguments: Any) -> Iterator[str]:
    """Yield the texts and numbers of a tool call's arguments, however deep they stand."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return
    waiting = list(arguments.values()) if isinstance(arguments, Mapping) else []
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
        elif isinstance(value, str | int | float) and not isinstance(value, bool):
            yield str(value)


def _tool_calls(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    calls = message.get("tool_calls") if message.get("role") == "assistant" else None
    return [call for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    return function if isinstance(function, Mapping) else tool


def _named(tool: Mapping[str, Any]) -> str:
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
    calls = sum(len(str(_function(call).get("arguments") or "")) + len(_named(call)) for call in _tool_calls(message))
    return calls + (0 if calls else len(_THINK.sub("", _content(message))))
