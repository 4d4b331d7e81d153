"""A chat request in vLLM's words, where OpenAI's API knows more of them.

- The role `developer` becomes `system`, as OpenAI means it: most chat templates know no `developer`, and many leave
  such a message out without a word.
- A `tool_choice` of the type `allowed_tools` becomes the tools that it allows, and its mode.
- `functions`, which vLLM does not read, are refused: the model would never hear of them.

Promises: where a request has neither, it stays as it is; linking and the records go by what the client said. Pure.
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


def with_vllm_fields(wanted: ChatRequest) -> ChatRequest:
    """Return the request as vLLM understands it; itself where it does already. Raises BadRequest."""
    for said in wanted.messages:
        if said.get("role") == "developer":
            wanted = _without_developers(wanted)
            break
    if "functions" in wanted.fields and request_body.value(wanted.fields, "functions"):
        raise BadRequest("`functions` are not served here: send them as `tools`", param="functions")
    choice = wanted.fields.get("tool_choice")
    if choice is not None and b"allowed_tools" in bytes(choice):
        wanted = _with_allowed_tools(wanted)
    return wanted


def _without_developers(wanted: ChatRequest) -> ChatRequest:
    messages = [said | {"role": "system"} if said.get("role") == "developer" else said for said in wanted.messages]
    raws = [
        Raw(_encode(new)) if new is not old else raw
        for new, old, raw in zip(messages, wanted.messages, _raws.decode(wanted.fields["messages"]), strict=True)
    ]
    fields = {**wanted.fields, "messages": Raw(_encode(raws))}
    return msgspec.structs.replace(wanted, fields=fields, messages=messages)


def _with_allowed_tools(wanted: ChatRequest) -> ChatRequest:
    choice = request_body.value(wanted.fields, "tool_choice")
    if not isinstance(choice, dict) or choice.get("type") != _ALLOWED:
        return wanted
    try:
        allowed = choice[_ALLOWED]
        names = [tool["function"]["name"] for tool in allowed["tools"]]
        mode: Any = allowed.get("mode", "auto")
        tools = [tool for tool in request_body.value(wanted.fields, "tools") if tool["function"]["name"] in names]
    except (KeyError, TypeError, AttributeError) as error:
        raise BadRequest(f"`tool_choice` allows tools in another form than {_FORM}", param="tool_choice") from error
    if not tools:
        raise BadRequest(f"`tool_choice` allows none of the `tools`, but {', '.join(names)}", param="tool_choice")
    fields = {**wanted.fields, "tools": Raw(_encode(tools)), "tool_choice": Raw(_encode(mode))}
    return msgspec.structs.replace(wanted, fields=fields)


_FORM = (
    '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", '
    '"tools": [{"type": "function", "function": {"name": NAME}}]}}'
)
