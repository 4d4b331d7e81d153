"""Directives for the scripted vLLM: an answer of text, a tool call, and what satisfies a conformance suite."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Script = Mapping[str, str]
Messages = list[dict[str, Any]]


def says(text: str) -> Script:
    """An answer of text; the script needs dots for spaces."""
    return {"say": text.replace(" ", ".")}


def calls(tool: str, **arguments: Any) -> Script:
    """An answer with one tool call."""
    return {"tool": tool, "args": json.dumps(arguments).replace(" ", ".")}


def text_of(*messages: Mapping[str, Any]) -> str:
    """Return the text of messages, sent as a string or in parts, one after another."""
    contents = [message.get("content") or "" for message in messages]
    return "\n".join(
        content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        for content in contents
    )


def obliging(body: Mapping[str, Any]) -> Script:
    """Think on request, call the first tool until it has a result, and follow the schemas of the request."""
    result: dict[str, str] = {}
    if body.get("reasoning_effort") or body.get("chat_template_kwargs"):
        result["think"] = "let.me.see"
    wanted = body.get("response_format") or {}
    if wanted.get("type") == "json_schema":
        result["say"] = _json(wanted["json_schema"]["schema"])
    if body.get("tools") and body["messages"][-1]["role"] != "tool":
        function = body["tools"][0]["function"]
        result |= {"tool": function["name"], "args": _json(function.get("parameters") or {})}
    return result


def _json(schema: dict[str, Any]) -> str:
    return json.dumps(_example(schema), separators=(",", ":"))


def _example(schema: dict[str, Any]) -> Any:
    """Return a value that the schema allows."""
    if schema.get("enum"):
        return schema["enum"][0]
    if "properties" in schema:
        return {name: _example(inner) for name, inner in schema["properties"].items()}
    return {"integer": 1, "number": 1, "boolean": True, "array": [], "object": {}}.get(schema.get("type", ""), "x")
