"""Checks of tools, answers, behavior and resources. Pure."""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from ratchet.store.records import ToolCall, Transcript
from ratchet.store.states import ToolOutcome, ToolResult
from ratchet.trainer.judges.judgement import text_of
from ratchet.trainer.observability.metrics import Finding
from ratchet.trainer.settings.trainer_settings import SentinelSettings
from ratchet.trainer.statistics import MIN_SIGMAS, MIN_VALUES, share_change

# Tool health: whether a tool fails more often than before. Pure.
#
# Only calls that match their tool's schema count: a misspelt argument is a failure of the policy, not of the
# environment. A tool call fails if its result is an error, a timeout or empty. Within one version the policy does not
# change, so an increase within it comes from the environment and pauses training. An increase that comes with a version
# may come from either; it raises an alarm without a pause. A tool that fails almost always pauses training whatever its
# history.

CHECK = "tool_health"
METRIC = "ratchet_tool_failure_ratio"
TOOL_WINDOW = 50  # newest results of a tool, compared with its earlier ones
_MAX_FAILURE_INCREASE = 0.3  # of a tool's failure rate over its history
VALID_OUTCOMES = (ToolOutcome.VALID, ToolOutcome.UNCHECKED)


@dataclass(frozen=True, slots=True)
class ToolHistory:
    """The earlier failures and calls of a tool, and whether the same policy versions made them."""

    failures: int
    calls: int
    same_versions: bool


def check_tool_health(
    newest: Sequence[ToolCall], settings: SentinelSettings, known: Mapping[str, ToolHistory] | None = None
) -> tuple[list[Finding], dict[str, ToolHistory]]:
    """Return one finding per tool, and the histories they were compared with.

    `newest` are answered tool calls, newest first. `known` holds the histories of the tools that failed at the last
    check: they are compared with the same history again, or a long failure would become its own baseline.
    """
    findings, histories = [], {}
    for tool, calls in _by_tool(newest).items():
        recent, earlier = calls[:TOOL_WINDOW], calls[TOOL_WINDOW:]
        if len(recent) < MIN_VALUES:
            continue
        history = (known or {}).get(tool) or _history(recent, earlier)
        histories[tool] = history
        findings.append(_finding(tool, recent, history, settings))
    return findings, histories


def _by_tool(newest: Iterable[ToolCall]) -> dict[str, list[ToolCall]]:
    tools: dict[str, list[ToolCall]] = {}
    for call in newest:
        if call.result is not None and call.outcome in VALID_OUTCOMES:
            tools.setdefault(call.tool, []).append(call)
    return tools


def _history(recent: Sequence[ToolCall], earlier: Sequence[ToolCall]) -> ToolHistory:
    versions = {call.version for call in recent}
    same = [call for call in earlier if call.version in versions]
    chosen = same if len(same) >= MIN_VALUES else earlier
    return ToolHistory(sum(map(_fails, chosen)), len(chosen), chosen is same)


def _fails(call: ToolCall) -> bool:
    return call.result is not ToolResult.OK


def _finding(tool: str, recent: Sequence[ToolCall], history: ToolHistory, settings: SentinelSettings) -> Finding:
    failures = sum(map(_fails, recent))
    share = failures / len(recent)
    change = share_change((history.failures, history.calls), (failures, len(recent)))
    classes = Counter(str(call.result) for call in recent if _fails(call))
    results = ", ".join(f"{count} {name}" for name, count in classes.most_common())
    failing = f"tool {tool!r} failed in {failures} of its last {len(recent)} calls ({results})"
    if len(recent) >= TOOL_WINDOW and share >= settings.max_tool_failure_rate:
        return Finding(CHECK, METRIC, tool, share, f"{failing}: fix the tool, or raise max_tool_failure_rate", True)
    if change is not None and change.after - change.before >= _MAX_FAILURE_INCREASE and change.sigmas >= MIN_SIGMAS:
        before = f"{failing}, up from {change.before:.0%}"
        if history.same_versions:
            return Finding(CHECK, METRIC, tool, share, f"{before} under the same version: fix the tool", True)
        newest = recent[0].version
        return Finding(CHECK, METRIC, tool, share, f"{before}: it began with version {newest}; check both")
    return Finding(CHECK, METRIC, tool, share)


# What one answer does: it calls tools, asks a question in place of an action, refuses, or repeats itself. Pure.
#
# Reads assistant messages in the form of Chat Completions. The words of refusals are English; a check compares two
# versions on the same prompts, so text that only looks like a refusal or a question counts against neither.

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
    function = tool.get("function")
    return function if isinstance(function, Mapping) else tool


def name_of(tool: Mapping[str, Any]) -> str:
    """Return the name of a tool, or of the tool that a call names; "" without one."""
    return str(function_of(tool).get("name") or "")


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


# TrajectoryBehavior: a few numbers about a trajectory, computed once from its transcript. Pure.
#
# A hallucinated argument is a value of a tool call that occurs nowhere in the model's context before it. An identifier
# (a word with digits, @, / or _) must occur as a whole; of several words one must. Short numbers, booleans and words
# from the tool's own description are not checked: they are choices, not claims.
#
# Reasoning is the text beside tool calls, in reasoning fields and in <think>. Engines do not attribute tokens, so its
# tokens are estimated as the sampled tokens times its share of the characters.

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


# Resources: the files, addresses and ids in a trajectory's input, and those that its tool calls named. Pure.
#
# Text of agents and tools is only searched for names, never followed, and the search is bounded in characters and
# names. A name is recognised by its form: a path, a URL, a file with an extension, a word of letters and digits.

_MAX_CHARS = 200_000  # of a trajectory
_MAX_NAMES = 100  # of a trajectory, in its input and in its calls each
_MAX_NAME_CHARS = 200  # longer words are not names
_PIECE = re.compile(r"[^\s\"'`<>()\[\]{},;|\\]+")
_FILE = re.compile(r"[\w-]{2,}\.[A-Za-z][A-Za-z0-9]{0,5}")
_ID = re.compile(r"(?=[^\d]*\d)(?=[^A-Za-z]*[A-Za-z])[\w@.-]{4,}")


def names_in(texts: Iterable[str]) -> frozenset[str]:
    """Return the first resource names in texts."""
    found: dict[str, None] = {}
    for name in _names(texts):
        found[name] = None
        if len(found) == _MAX_NAMES:
            break
    return frozenset(found)


def _names(texts: Iterable[str]) -> Iterator[str]:
    left = _MAX_CHARS
    for text in texts:
        for piece in _PIECE.findall(text[:left]):
            name = piece.strip(".:!?=*#")
            if 3 <= len(name) <= _MAX_NAME_CHARS and _is_resource(name):
                yield name
        left -= len(text)
        if left <= 0:
            return


def _is_resource(name: str) -> bool:
    if "://" in name:
        return True
    if "/" in name:  # but not "and/or"
        return any(map(str.isalnum, name)) and (name[0] in "/~." or name.count("/") > 1 or "." in name)
    return _FILE.fullmatch(name) is not None or _ID.fullmatch(name) is not None
