"""Corrects derender's output where it differs from plain chat. Pure; no I/O.

The differences were found by comparing both on the real vLLM 0.32 (`benchmarks/exact_context.py`):
- With a parser, derender keeps special tokens and would parse the final id as text: it is removed first.
- Derender ignores stop strings: the string is removed from the text; while streaming, text that may begin one is
  delayed.
- The finish reason is `tool_calls` only if the engine stopped after tool calls.
- Tool-call ids get vLLM's prefix.
- Null members of a delta are removed; the role comes in a separate first event.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ratchet.proxy.exact.scale_out import GeneratedChoice

TOOL_ID = "chatcmpl-tool-"
_TEXTS = ("content", "reasoning")  # in the order in which a stop string is searched

Json = dict[str, Any]


def strip_turn_end(choice: GeneratedChoice) -> GeneratedChoice:
    """Return the choice without the id that ended it; a stop string has no id."""
    ids = choice.token_ids or []
    if choice.finish_reason == "stop" and not isinstance(choice.stop_reason, str):
        ids = ids[:-1]
    return GeneratedChoice(choice.index, ids, choice.finish_reason, choice.stop_reason)


def fix_message(message: Mapping[str, Any] | None, choice: GeneratedChoice) -> Json:
    """Return a message as plain chat returns it; derender returns none without ids."""
    fixed: Json = {"role": "assistant", "content": None if message else "", **(message or {})}
    if isinstance(choice.stop_reason, str):
        _cut(fixed, choice.stop_reason)
    if fixed.get("tool_calls"):
        fixed["tool_calls"] = [_with_prefix(call) for call in fixed["tool_calls"]]
    return fixed


def fix_finish_reason(choice: GeneratedChoice, message: Mapping[str, Any], tool_choice: Any) -> str | None:
    """Return the finish reason of a response that is not streamed."""
    if choice.finish_reason == "abort":  # plain chat hides it behind complete tool calls
        return choice.finish_reason
    has_calls = bool(message.get("tool_calls")) and tool_choice in (None, "auto")
    required = tool_choice == "required" and choice.finish_reason == "stop"
    return "tool_calls" if has_calls or required else choice.finish_reason


def _cut(message: Json, stop: str) -> None:
    for name in _TEXTS:
        head, found, _ = (message.get(name) or "").rpartition(stop)
        if found:
            message[name] = head
            return


def _with_prefix(call: Mapping[str, Any]) -> Json:
    name = call.get("id")
    return {**call, "id": name if not name or name.startswith(TOOL_ID) else TOOL_ID + name}


class DerenderStreamFixer:
    """Corrects the pieces of one streamed choice, in order."""

    def __init__(self, stops: Sequence[str], tool_choice: Any) -> None:
        self._delayed = dict.fromkeys(_TEXTS, "")
        self._stops = bool(stops)
        self._max_delay = max((len(stop) for stop in stops), default=1) - 1
        self._is_named_tool = isinstance(tool_choice, Mapping)
        self._tools = False

    def delta(self, given: Mapping[str, Any], piece: GeneratedChoice) -> Json:
        """Return a delta as plain chat returns it."""
        delta = {name: value for name, value in given.items() if value not in (None, []) and name != "role"}
        if "tool_calls" in delta:
            self._tools = True
            delta["tool_calls"] = [_without_nulls(_with_prefix(call)) for call in delta["tool_calls"]]
        if self._stops:
            self._delay_stop(delta, piece)
        return delta

    def finish(self, piece: GeneratedChoice) -> str | None:
        """Return the finish reason of a piece."""
        return (
            "tool_calls"
            if piece.finish_reason == "stop" and self._tools and not self._is_named_tool
            else piece.finish_reason
        )

    def _delay_stop(self, delta: Json, piece: GeneratedChoice) -> None:
        """Delay text that may begin a stop string; at the end, emit it without the matched one."""
        last = piece.finish_reason is not None
        for name in _TEXTS:
            text = self._delayed[name] + (delta.pop(name, None) or "")
            other_goes_on = name == "reasoning" and (delta.get("content") or self._delayed["content"])
            keep = 0 if last or other_goes_on else min(self._max_delay, len(text))
            self._delayed[name] = text[len(text) - keep :]
            if text[: len(text) - keep]:
                delta[name] = text[: len(text) - keep]
        if last and isinstance(piece.stop_reason, str):
            _cut(delta, piece.stop_reason)
            for name in [name for name in _TEXTS if delta.get(name) == ""]:
                del delta[name]


def _without_nulls(call: Mapping[str, Any]) -> Json:
    """Return a streamed tool call without null members, also in its function."""
    cleaned = {name: value for name, value in call.items() if value is not None}
    if isinstance(cleaned.get("function"), Mapping):
        cleaned["function"] = {name: value for name, value in cleaned["function"].items() if value is not None}
    return cleaned


def make_first_delta(index: int) -> Json:
    """Return the choice of a stream's first event: the role, and nothing yet."""
    return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
