"""A request to /v1/responses as a chat request.

Consecutive assistant items (reasoning, message, calls) become one chat message, as the model generated them. A custom
tool becomes a function with one string, `input`. Tools of a namespace are treated like others. What vLLM cannot serve
is rejected by name. Tools that OpenAI's servers run are left out, because the model cannot call them; of their items in
a history a text says what can be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from ratchet.proxy.dialects import inner_request
from ratchet.proxy.dialects.inner_request import ChatMessages, Json
from ratchet.proxy.errors import BadRequest
from ratchet.proxy.wire.request_body import ChatRequest
from ratchet.store.content import messages as canon

_REFUSED = ("background", "conversation", "prompt")
# Tools that the client runs, in formats that only OpenAI's models know.
_CLIENT_RUN = ("computer", "computer_use_preview", "local_shell", "shell", "apply_patch")
_NAMESPACE = "namespace"
# Calls of such tools in a history that another model began, with the member that has their arguments; and the results.
_OWN_CALLS = {
    "local_shell_call": "action", "shell_call": "action", "apply_patch_call": "operation",
    "tool_search_call": "arguments",
}  # fmt: skip
_OWN_OUTPUTS = ("local_shell_call_output", "shell_call_output", "apply_patch_call_output", "tool_search_output")
# Items of OpenAI's servers.
_SERVER_ITEMS = (
    "compaction", "compaction_summary", "context_compaction", "web_search_call", "file_search_call",
    "code_interpreter_call", "image_generation_call", "mcp_call", "mcp_list_tools", "mcp_approval_request",
    "mcp_approval_response",
)  # fmt: skip
_UNREAD = ("type", "id", "status", "encrypted_content", "result")  # of these items; `result` is an image
_LOGPROBS = "message.output_text.logprobs"  # the value of `include` that requests them
INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def read(body: Json, added: Sequence[Json], before: Sequence[Json]) -> ChatRequest:
    """Return the inner chat request: instructions, the conversation before, the messages added. Raises BadRequest."""
    messages: list[Json] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    messages = canon.with_one_system_message([*messages, *before, *added])
    tools, choice = _tools(body), body.get("tool_choice")
    if isinstance(choice, dict) and choice["type"] == "allowed_tools":
        names = {str(tool.get("name")) for tool in choice["tools"]}
        tools = [tool for tool in tools if tool["function"]["name"] in names]
        choice = choice.get("mode", "auto")
    fields = {
        "max_tokens": body.get("max_output_tokens"),
        "temperature": body.get("temperature"),
        "top_p": body.get("top_p"),
        "tools": tools or None,
        "tool_choice": _tool_choice(choice) if tools else None,
        "parallel_tool_calls": body.get("parallel_tool_calls") if tools else None,
        "reasoning_effort": (body.get("reasoning") or {}).get("effort"),
        "logprobs": True if _LOGPROBS in (body.get("include") or ()) else None,
        "top_logprobs": body.get("top_logprobs") if _LOGPROBS in (body.get("include") or ()) else None,
        "response_format": _response_format((body.get("text") or {}).get("format") or {}),
    }
    return inner_request.chat_request(body, messages, fields)


def added_messages(body: Json) -> list[Json]:
    """Return the `input` as chat messages. Raises BadRequest."""
    inner_request.require(body, "input")
    for name in _REFUSED:
        if body.get(name):
            raise BadRequest(f"`{name}` is not supported", param=name)
    value = body["input"]
    if not value and not body.get("previous_response_id"):
        raise BadRequest("`input` is empty", param="input")
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise BadRequest("`input` must be text or a list of items", param="input")
    messages = ChatMessages()
    for place, item in enumerate(value):
        with inner_request.named(f"input[{place}]"):
            _add(messages, item)
    return messages.joined()


def is_reference(item: Any) -> bool:
    """Return whether an input item refers to an item of an earlier response."""
    return isinstance(item, dict) and item.get("type") == "item_reference"


def custom_names(body: Json) -> frozenset[str]:
    """Return the names of the custom tools."""
    return frozenset(tool["name"] for tool in _own_tools(body) if tool["type"] == "custom")


def namespaces(body: Json) -> dict[str, str]:
    """Return the namespace of each tool that has one, by the tool's name."""
    spaces = (tool for tool in body.get("tools") or () if tool["type"] == _NAMESPACE)
    return {tool["name"]: space["name"] for space in spaces for tool in space["tools"] if "name" in tool}


def _add(messages: ChatMessages, item: Json) -> None:
    """Add an input item to the messages, or to the assistant's turn that it belongs to."""
    match item.get("type") or "message":
        case "message" if item["role"] == "assistant":
            messages.assistant().texts.append(_content(item["content"], "assistant"))
        case "message":
            role = "system" if item["role"] == "developer" else item["role"]
            messages.add({"role": role, "content": _content(item["content"], role)})
        case "reasoning":
            messages.assistant().thoughts.append(_thought(item))
        case "function_call":
            _add_call(messages, item, item["name"], item["arguments"])
        case "custom_tool_call":
            _add_call(messages, item, item["name"], _json({"input": item["input"]}))
        case "function_call_output" | "custom_tool_call_output":
            _add_output(messages, item)
        case kind if kind in _OWN_CALLS:
            _add_call(messages, item, kind.removesuffix("_call"), _json(item[_OWN_CALLS[kind]]))
        case kind if kind in _OWN_OUTPUTS:
            output = item.get("output", item.get("tools")) or item.get("status") or ""
            text = output if isinstance(output, str) else _json(output)
            messages.add({"role": "tool", "tool_call_id": _call_id(item), "content": text})
        case kind if kind in _SERVER_ITEMS:
            messages.assistant().texts.append(_mark(kind, item))
        case "ghost_snapshot":
            pass  # Codex's own note of the files, which no model reads
        case kind:
            raise BadRequest(f"input: an item of the type {kind} is not supported", param="input")


def _add_call(messages: ChatMessages, item: Json, name: str, arguments: str) -> None:
    messages.assistant().calls.append(inner_request.called(_call_id(item), name, arguments))


def _call_id(item: Json) -> str:
    name: str = item.get("call_id") or item["id"]
    return name


def _mark(kind: str, item: Json) -> str:
    """Return the text that stands for an item of OpenAI's servers: what can be read of it, or that it was left out."""
    known = {name: value for name, value in item.items() if value and name not in _UNREAD}
    return f"[{kind}: {_json(known)}]\n" if known else f"[{kind}, left out]\n"


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _add_output(messages: ChatMessages, item: Json) -> None:
    """Add a tool's result; its images follow as a user message, because tool messages are text."""
    output = item["output"]
    parts = [{"type": "input_text", "text": output}] if isinstance(output, str) else output
    images = [_part(part) for part in parts if part["type"] == "input_image"]
    text = _content([part for part in parts if part["type"] != "input_image"], "tool")
    messages.add({"role": "tool", "tool_call_id": item["call_id"], "content": text})
    if images:
        messages.add({"role": "user", "content": images})


def _thought(item: Json) -> str:
    parts: Iterable[Json] = item.get("content") or item.get("summary") or ()
    return "".join(part["text"] for part in parts)


def _content(content: Any, role: str) -> Any:
    if isinstance(content, str):
        return content
    parts = [_part(part) for part in content]
    if role == "user":
        return inner_request.content_of(parts)
    joined = inner_request.joined(parts, "" if role == "assistant" else "\n")
    if role == "assistant" and not isinstance(joined, str):
        raise BadRequest("input: an assistant message may contain text only", param="input")
    return joined


def _part(part: Json) -> Json:
    match part["type"]:
        case "input_text" | "output_text" | "text":
            return {"type": "text", "text": part["text"]}
        case "refusal":
            return {"type": "text", "text": part["refusal"]}
        case "input_image" if part.get("image_url"):
            return inner_request.image(part["image_url"], part.get("detail"))
        case kind:
            raise BadRequest(f"input: a content part of the type {kind} is not supported", param="input")


def _own_tools(body: Json) -> Iterator[Json]:
    """Yield the tools, those of a namespace one by one. Raises BadRequest."""
    for place, tool in enumerate(body.get("tools") or ()):
        try:
            yield from tool["tools"] if tool["type"] == _NAMESPACE else (tool,)
        except (KeyError, TypeError, AttributeError) as error:
            raise inner_request.unreadable(f"tools[{place}]", error) from error


def _tools(body: Json) -> list[Json]:
    tools = []
    for tool in _own_tools(body):
        if tool["type"] in _CLIENT_RUN:
            raise BadRequest(f"tools: a tool of the type {tool['type']} is not supported", param="tools")
        if tool["type"] == "function":
            if "function" in tool and "name" not in tool:
                raise BadRequest(
                    "tools: a function's `name` belongs next to its `type`, not in `function`", param="tools"
                )
            value = (tool["name"], tool.get("description"), tool.get("parameters"), tool.get("strict"))
            tools.append(inner_request.function(*value))
        elif tool["type"] == "custom":
            tools.append(inner_request.function(tool["name"], tool.get("description"), INPUT, None))
    return tools


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict):
        return {"type": "function", "function": {"name": choice["name"]}} if "name" in choice else "auto"
    return choice


def _response_format(wanted: Json) -> Json | None:
    if wanted.get("type") == "json_schema":
        named = {name: wanted[name] for name in ("name", "schema", "strict", "description") if name in wanted}
        return {"type": "json_schema", "json_schema": named}
    return {"type": "json_object"} if wanted.get("type") == "json_object" else None
