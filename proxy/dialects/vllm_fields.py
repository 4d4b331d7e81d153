"""Converts what only OpenAI's API knows in a chat request to vLLM's fields.

- The role `developer` becomes `system`, as OpenAI defines it. Most chat templates do not know `developer`, and many
  drop such a message silently.
- A `tool_choice` of the type `allowed_tools` becomes the tools that it allows, and its mode.
- `functions` are rejected: vLLM ignores them.

Other requests stay unchanged. Linking and records use the client's own messages. Pure.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from ratchet.proxy.errors import BadRequest
from ratchet.proxy.wire import request_body
from ratchet.proxy.wire.request_body import ChatRequest

_raws = msgspec.json.Decoder(list[Raw])
_encode = msgspec.json.Encoder().encode

_ALLOWED = "allowed_tools"


def with_vllm_fields(request: ChatRequest) -> ChatRequest:
    """Return the request in vLLM's form, or the same object if nothing changes. Raises BadRequest."""
    if request.has_developer:
        request = _without_developers(request)
    if "functions" in request.fields and request_body.value(request.fields, "functions"):
        raise BadRequest("`functions` are not supported: send them as `tools`", param="functions")
    choice = request.fields.get("tool_choice")
    if choice is not None and b"allowed_tools" in bytes(choice):
        request = _with_allowed_tools(request)
    return request


def _without_developers(request: ChatRequest) -> ChatRequest:
    messages = [
        message | {"role": "system"} if message.get("role") == "developer" else message for message in request.messages
    ]
    raws = [
        Raw(_encode(new)) if new is not old else raw
        for new, old, raw in zip(messages, request.messages, _raws.decode(request.fields["messages"]), strict=True)
    ]
    fields = {**request.fields, "messages": Raw(_encode(raws))}
    return msgspec.structs.replace(request, fields=fields, messages=messages)


def _with_allowed_tools(request: ChatRequest) -> ChatRequest:
    choice = request_body.value(request.fields, "tool_choice")
    if not isinstance(choice, dict) or choice.get("type") != _ALLOWED:
        return request
    try:
        allowed = choice[_ALLOWED]
        names = [tool["function"]["name"] for tool in allowed["tools"]]
        mode: Any = allowed.get("mode", "auto")
        tools = [tool for tool in request_body.value(request.fields, "tools") if tool["function"]["name"] in names]
    except (KeyError, TypeError, AttributeError) as error:
        raise BadRequest(f"`tool_choice` must have the form {_FORM}", param="tool_choice") from error
    if not tools:
        raise BadRequest(f"`tool_choice` allows none of the `tools`; it names {', '.join(names)}", param="tool_choice")
    fields = {**request.fields, "tools": Raw(_encode(tools)), "tool_choice": Raw(_encode(mode))}
    return msgspec.structs.replace(request, fields=fields)


_FORM = (
    '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", '
    '"tools": [{"type": "function", "function": {"name": NAME}}]}}'
)
