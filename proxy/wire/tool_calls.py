"""Assembles the streamed pieces of tool calls, for the record and for the clients' dialects alike. Pure.

Servers differ in what a piece repeats: the id and the whole name in each, the name in parts or after the id, several
calls at one index, each with an id of its own, arguments that alternate between calls.
"""

from __future__ import annotations

from typing import Any

import msgspec

_object = msgspec.json.Decoder(dict[str, Any])


class StreamedToolCall:
    """One tool call while its pieces arrive. `index` is the server's; several calls may have the same."""

    __slots__ = ("_arguments", "_is_complete", "id", "index", "name")

    def __init__(self, index: int) -> None:
        self.index = index
        self.id = ""
        self.name = ""
        self._arguments: list[str] = []
        self._is_complete: bool | None = None  # not known since the last piece

    @property
    def arguments(self) -> str:
        """The arguments so far."""
        return "".join(self._arguments)

    @property
    def has_started(self) -> bool:
        """Whether its name and the beginning of its arguments are known: its name does not change any more."""
        return bool(self.name and self._arguments)

    def is_complete(self) -> bool:
        """Return whether the arguments are a complete JSON object."""
        if self._is_complete is None:
            may_be = bool(self._arguments) and self._arguments[-1].rstrip().endswith("}")
            self._is_complete = may_be and _is_object(self.arguments)
        return self._is_complete

    def add(self, call_id: str, name: str, arguments: str) -> None:
        """Add the fields of a piece; empty ones are not in it. The first id counts."""
        self.id = self.id or call_id
        if name != self.name and not self.has_started:  # an equal name is the whole one again
            self.name += name
        if arguments:
            self._arguments.append(arguments)
            self._is_complete = None

    def as_message(self) -> dict[str, Any]:
        """Return the call as a member of a message's `tool_calls`."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id or None, "type": "function", "function": function}


class ToolCalls:
    """The tool calls of one answer."""

    __slots__ = ("_at", "_by_id", "_calls")

    def __init__(self) -> None:
        self._calls: list[StreamedToolCall] = []
        self._at: dict[int, StreamedToolCall] = {}  # the last one at each index
        self._by_id: dict[tuple[int, str], StreamedToolCall] = {}

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, piece: dict[str, Any]) -> tuple[StreamedToolCall, str]:
        """Add a piece; return its call and the arguments in it. Raises TypeError for a field of the wrong type."""
        index = piece.get("index") or 0
        if not isinstance(index, int):
            raise TypeError(f"a tool call has the index {str(index)[:40]!r}")
        function = piece.get("function") or {}
        call_id, name = _text(piece.get("id")), _text(function.get("name"))
        arguments = _text(function.get("arguments"))
        call = self._find(index, call_id, name)
        call.add(call_id, name, arguments)
        return call, arguments

    def as_message(self) -> list[dict[str, Any]]:
        """Return the calls as a message's `tool_calls`, in the order of their indexes."""
        return [call.as_message() for call in sorted(self._calls, key=lambda call: call.index)]

    def _find(self, index: int, call_id: str, name: str) -> StreamedToolCall:
        """Return the call that a piece belongs to.

        An id that is new at its index starts a call. Some servers give each piece a new id (vLLM 0.7 with a named
        tool): it is the same call if the piece repeats the name of one whose arguments are not complete.
        """
        call = self._by_id.get((index, call_id)) or self._at.get(index)
        if call is not None and call_id and call.id and call_id != call.id:
            is_repeated = bool(name) and name == call.name and not call.is_complete()
            call = call if is_repeated else None
        if call is None:
            call = StreamedToolCall(index)
            self._calls.append(call)
        self._at[index] = call
        if call_id and not call.id:
            self._by_id[index, call_id] = call
        return call


def _is_object(text: str) -> bool:
    try:
        _object.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return False
    return True


def _text(value: Any) -> str:
    """Return a text; an empty one for None. Raises TypeError for anything else."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:40]!r} is not a string")
    return value
