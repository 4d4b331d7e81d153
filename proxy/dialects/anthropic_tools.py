"""Anthropic's own tools that the client runs (bash, text editor, memory), as functions for any model.

A request names only the type of such a tool, because Anthropic's models were trained on them. Here they get the schema
that Anthropic documents, so that the client can run the calls. Tools that Anthropic's servers run are left out. Tools
that need screenshots (computer, browser) are rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ratchet.proxy.dialects import inner_request
from ratchet.proxy.dialects.inner_request import Json
from ratchet.proxy.errors import BadRequest

_TEXT = {"type": "string"}
_LINES = {"type": "array", "items": {"type": "integer"}, "description": "the first and the last line to show"}
_EDITS: Json = {
    "path": _TEXT,
    "view_range": _LINES,
    "file_text": {**_TEXT, "description": "for create"},
    "old_str": {**_TEXT, "description": "for str_replace"},
    "new_str": {**_TEXT, "description": "for str_replace"},
    "insert_line": {"type": "integer", "description": "for insert: the line after which"},
}
_MOVES: Json = {"old_path": {**_TEXT, "description": "for rename"}, "new_path": {**_TEXT, "description": "for rename"}}
_INSERTED: Json = {"insert_text": {**_TEXT, "description": "for insert"}}
_REFUSED = ("computer", "browser")


CHANGES = ("tool_addition", "tool_removal")  # blocks of system messages


def functions(tools: Sequence[Json], messages: Sequence[Json]) -> list[Json]:
    """Return the tools that the model may call after these messages, in the chat format. Raises BadRequest."""
    chat_tools = []
    for place, tool in enumerate(_after(tools, messages)):
        with inner_request.named(f"tools.{place}"):
            function = _function(tool)
        chat_tools += [function] if function else []
    return chat_tools


def _after(tools: Sequence[Json], messages: Sequence[Json]) -> Sequence[Json]:
    """Return the tools after the blocks that add and remove some, as vLLM does. Raises BadRequest."""
    known: dict[str, Json] = {}
    removed: set[str] = set()
    for place, message in enumerate(messages):
        with inner_request.named(f"messages.{place}"):
            blocks = message["content"] if message["role"] == "system" else ()
            for block in () if isinstance(blocks, str) else blocks:
                if block["type"] in CHANGES:
                    known = known or {tool["name"]: tool for tool in tools}
                    _change(known, removed, block["type"], block["tool"])
    return [tool for name, tool in known.items() if name not in removed] if known else tools


def _change(known: dict[str, Json], removed: set[str], kind: str, named: Json) -> None:
    tool = named.get("definition")
    name = tool["name"] if tool else named["name"]
    if not tool and name not in known:
        raise BadRequest(f"messages: a {kind} block names {name!r}, which is not in tools", param="messages")
    if kind == "tool_addition":
        known[name] = tool or {**known[name], "defer_loading": None}
        removed.discard(name)
    else:
        removed.add(name)


def _function(tool: Json) -> Json | None:
    kind = tool.get("type") or "custom"
    if kind == "custom":
        schema, deferred = tool["input_schema"], tool.get("defer_loading")
        return inner_request.function(tool["name"], tool.get("description"), schema, tool.get("strict"), deferred)
    if kind.startswith(_REFUSED):
        raise BadRequest(f"tools: a tool of the type {kind} is not supported", param="tools")
    if kind.startswith("bash_"):
        return _of(tool, "Run a command in a bash shell that stays open.", _bash())
    if kind.startswith("memory_"):
        commands = ("view", "create", "str_replace", "insert", "delete", "rename")
        description = "Keep notes in files below /memories, which stay between conversations."
        return _of(tool, description, _commands(commands, _EDITS | _INSERTED | _MOVES, ["command"]))
    if kind.startswith("text_editor_"):
        undone = () if kind >= "text_editor_20250429" else ("undo_edit",)
        inserted = _INSERTED if kind >= "text_editor_20250728" else {}
        commands = ("view", "create", "str_replace", "insert", *undone)
        description = "View, create and edit text files."
        return _of(tool, description, _commands(commands, _EDITS | inserted, ["command", "path"]))
    return None


def _of(tool: Json, description: str, parameters: Json) -> Json:
    return inner_request.function(tool["name"], description, parameters, None)


def _bash() -> Json:
    restart = {"type": "boolean", "description": "begin with a new shell instead"}
    return {"type": "object", "properties": {"command": _TEXT, "restart": restart}}


def _commands(names: tuple[str, ...], fields: Json, required: list[str]) -> Json:
    command: Any = {"type": "string", "enum": list(names)}
    return {"type": "object", "properties": {"command": command, **fields}, "required": required}
