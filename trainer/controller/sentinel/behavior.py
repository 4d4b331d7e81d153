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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ratchet.store.records import Transcript
from ratchet.store.states import ToolOutcome
from ratchet.trainer.controller.sentinel.answers import (
    REASONING_FIELDS,
    THINK,
    asks_in_place_of_acting,
    function_of,
    name_of,
    text_of,
    tool_calls_of,
)
from ratchet.trainer.controller.sentinel.resources import names_in
from ratchet.trainer.controller.sentinel.tool_health import VALID_OUTCOMES

_MAX_CONTEXT_CHARS = 2_000_000  # of a trajectory; later calls are not checked
_MAX_ARGUMENTS = 200  # of a trajectory
_MAX_VALUE_CHARS = 2_000
_WORD = re.compile(r"\w{3,}")
_IDENTIFIER = re.compile(r"\S*[\d@/_]\S*")


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
    version: int = 0
    answers: int = 0  # assistant messages
    questions: int = 0  # answers that ask in place of acting
    checked_calls: int = 0  # tool calls that could be checked against the offered tools
    invalid_calls: int = 0  # of those


def read_behavior(member: Transcript) -> TrajectoryBehavior:
    """Return the behavior of a trajectory."""
    checked, hallucinated = _count_arguments(member)
    answers = [message for message in member.messages if message.get("role") == "assistant"]
    calls = [call for message in answers for call in tool_calls_of(message)]
    tokens = sum(call.completion_tokens for call in member.calls)
    reasoning, other = (sum(map(size, answers)) for size in (_reasoning_chars, _other_chars))
    offered = frozenset(filter(None, (name_of(tool) for tool in member.tools)))
    return TrajectoryBehavior(
        trajectory_id=member.trajectory.id,
        family=member.trajectory.family,
        cohort=member.trajectory.group_key,
        sampled_tokens=tokens,
        reasoning_tokens=tokens * reasoning / max(1, reasoning + other),
        actions=len(calls) + sum(not tool_calls_of(message) for message in answers),
        tool_calls=len(calls),
        arguments=checked,
        hallucinated=hallucinated,
        offered=offered,
        used=frozenset(name_of(call) for call in calls) & offered,
        shown=names_in(text_of(message) for message in member.messages if message.get("role") != "assistant"),
        version=member.trajectory.version,
        answers=len(answers),
        questions=sum(asks_in_place_of_acting(message, offered) for message in answers),
        checked_calls=sum(call.outcome is not ToolOutcome.UNCHECKED for call in member.tool_calls),
        invalid_calls=sum(call.outcome not in VALID_OUTCOMES for call in member.tool_calls),
        opened=names_in(value for call in calls for value in _values(function_of(call).get("arguments"))),
    )


def _count_arguments(member: Transcript) -> tuple[int, int]:
    """Return how many argument values were checked, and how many of them were hallucinated."""
    context = json.dumps(member.tools, ensure_ascii=False, default=str).casefold()
    checked = hallucinated = 0
    for message in member.messages:
        for call in tool_calls_of(message):
            for value in _values(function_of(call).get("arguments")):
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


def _reasoning_chars(message: Mapping[str, Any]) -> int:
    fields = next((str(message[name]) for name in REASONING_FIELDS if message.get(name)), "")
    content = text_of(message)
    beside = len(content) if tool_calls_of(message) else sum(map(len, THINK.findall(content)))
    return len(fields) + beside


def _other_chars(message: Mapping[str, Any]) -> int:
    calls = sum(
        len(str(function_of(call).get("arguments") or "")) + len(name_of(call)) for call in tool_calls_of(message)
    )
    return calls + (0 if calls else len(THINK.sub("", text_of(message))))
