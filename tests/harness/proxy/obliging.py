"""Directives for a model that satisfies a conformance suite.

It thinks on request, calls the first tool until it has a result, and follows the schemas of the request.
"""

from __future__ import annotations

import json
from typing import Any


def script(body: dict[str, Any]) -> dict[str, str]:
    """Return the directives of the scripted vLLM that suit a chat request."""
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
