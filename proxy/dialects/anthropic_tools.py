"""Anthropic's own tools that the client runs (bash, text editor, memory), as functions for any model.

A request names only the type of such a tool, because Anthropic's models were trained on them. Here they get the schema
that Anthropic documents, so that the client can run the calls. Tools that Anthropic's servers run are left out. Tools
that need screenshots (computer, browser) are rejected.
"""

from __future__ import annotations

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


def functions(tools: list[Json]) -> list[Json]:
    """Return the tools that the model may call in the chat format. Raises BadRequest."""
    chat_tools = []
    for place, tool in enumerate(tools):
        try:
            function = _function(tool)
        except (KeyError, TypeError, AttributeError) as error:
            raise inner_request.unreadable(f"tools.{place}", error) from error
        chat_tools += [function] if function else []
    return chat_tools


def _function(tool: Json) -> Json | None:
    kind = tool.get("type") or "custom"
    if kind == "custom":
        return inner_request.function(tool["name"], tool.get("description"), tool["input_schema"], tool.get("strict"))
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
