"""Converts what only OpenAI's API knows in a chat request to vLLM's fields.

- The role `developer` becomes `system`, as OpenAI defines it, and system messages after the first become part of it or
  reminders. Most chat templates do not know `developer`, and many reject or drop another system message.
- A `tool_choice` of the type `allowed_tools` becomes the tools that it allows, and its mode.
- `functions` are rejected: vLLM ignores them.

Other requests stay unchanged. Pure.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from ratchet.proxy.errors import BadRequest
from ratchet.proxy.wire import request_body
from ratchet.proxy.wire.request_body import ChatRequest
from ratchet.store.content import messages as canon

_raws = msgspec.json.Decoder(list[Raw])
_encode = msgspec.json.Encoder().encode

_ALLOWED = "allowed_tools"


def with_vllm_fields(request: ChatRequest) -> ChatRequest:
    """Return the request in vLLM's form, or the same object if nothing changes. Raises BadRequest."""
    if "functions" in request.fields and request_body.value(request.fields, "functions"):
        raise BadRequest("`functions` are not supported: send them as `tools`", param="functions")
    choice = request.fields.get("tool_choice")
    if choice is not None and b"allowed_tools" in bytes(choice):
        request = _with_allowed_tools(request)
    return request


def with_one_system_message(request: ChatRequest) -> ChatRequest:
    """Return the request with one system message at most, at the beginning; itself if it has no other.

    Only vLLM gets it: linking and records use the client's messages.
    """
    if not request.has_other_system:
        return request
    before = list(request.messages)
    raws = dict(zip(map(id, before), _raws.decode(request.fields["messages"]), strict=True))
    messages = canon.with_one_system_message(before)
    body = Raw(_encode([raws.get(id(message), message) for message in messages]))
    return msgspec.structs.replace(request, fields={**request.fields, "messages": body}, messages=messages)


def _with_allowed_tools(request: ChatRequest) -> ChatRequest:
    choice = request_body.value(request.fields, "tool_choice")
    if not isinstance(choice, dict) or choice.get("type") != _ALLOWED:
        return request
    try:
        allowed = choice[_ALLOWED]
        names = {str(tool["function"]["name"]) for tool in allowed["tools"]}
        mode: Any = allowed.get("mode", "auto")
        tools = [tool for tool in request_body.value(request.fields, "tools") if tool["function"]["name"] in names]
    except (KeyError, TypeError, AttributeError) as error:
        raise BadRequest(f"`tool_choice` must have the form {_FORM}", param="tool_choice") from error
    if not tools:
        raise BadRequest(
            f"`tool_choice` allows none of the `tools`; it names {', '.join(sorted(names))}", param="tool_choice"
        )
    fields = {**request.fields, "tools": Raw(_encode(tools)), "tool_choice": Raw(_encode(mode))}
    return msgspec.structs.replace(request, fields=fields)


_FORM = (
    '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", '
    '"tools": [{"type": "function", "function": {"name": NAME}}]}}'
)
