"""A request to /v1/messages as a chat request.

Thinking becomes the reasoning of its message. Tool results become tool messages before the rest of their turn. Images
stay in place, text documents become text, and later system messages become reminders in a user turn. What vLLM cannot
serve is rejected by name. Tools that Anthropic's servers run are left out, because the model cannot call them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ratchet.proxy.dialects import anthropic_tools, inner_request
from ratchet.proxy.dialects.inner_request import Json
from ratchet.proxy.errors import BadRequest
from ratchet.proxy.wire import lax_values
from ratchet.proxy.wire.request_body import ChatRequest

UNREADABLE = "unreadable_arguments"  # the one member of an `input` with arguments that are not JSON

_TYPES: dict[str, Sequence[type[Any]]] = {
    "messages": (list,), "system": (str, list), "tools": (list,), "thinking": (dict,), "output_config": (dict,),
    "output_format": (dict,), "tool_choice": (dict,),
}  # fmt: skip
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def read(body: Json) -> ChatRequest:
    """Return the inner chat request. Raises BadRequest."""
    if body.get("thread"):
        # The SDK's tool runner then sends the whole conversation instead.
        raise BadRequest("`thread` is not supported: send the whole conversation", code="thread_unsupported_request")
    inner_request.require(body, "model", "max_tokens", "messages")
    messages = chat_messages(body)
    tools = _tools(body)
    choice = body.get("tool_choice") or {}
    fields = {
        "max_tokens": body["max_tokens"],
        "temperature": body.get("temperature"),
        "top_p": body.get("top_p"),
        "stop": body.get("stop_sequences") or None,
        "tools": tools or None,
        "tool_choice": _tool_choice(choice) if tools and choice else None,
        "parallel_tool_calls": False
        if tools and lax_values.lax_bool(choice.get("disable_parallel_tool_use"))
        else None,
        "chat_template_kwargs": template_fields(body),
        "reasoning_effort": (body.get("output_config") or {}).get("effort"),
        "response_format": _response_format(body),
        **_continuation(messages),
    }
    return inner_request.chat_request(body, messages, fields)


def count_body(body: Json, served_name: str) -> Json:
    """Return the body for vLLM's /tokenize: with the prompt of the call itself. Raises BadRequest."""
    inner_request.require(body, "model", "messages")
    messages = chat_messages(body)
    fields = {"tools": _tools(body) or None, "chat_template_kwargs": template_fields(body), **_continuation(messages)}
    chosen = {name: value for name, value in fields.items() if value is not None}
    return {"model": served_name, "messages": messages, "add_generation_prompt": True, **chosen}


def chat_messages(body: Json) -> list[Json]:
    """Return the system prompt and the messages as chat messages. Raises BadRequest."""
    inner_request.check_types(body, _TYPES)
    if not body["messages"]:
        raise BadRequest("messages: at least one message is required", param="messages")
    messages: list[Json] = []
    if system := body.get("system"):
        with inner_request.named("system"):
            parts = [_part(block, "system") for block in _blocks(system)]
            messages.append({"role": "system", "content": inner_request.joined(parts, "")})  # as vLLM does
    for place, message in enumerate(body["messages"]):
        try:
            converted = _converted(message)
        except (KeyError, TypeError, AttributeError) as error:
            raise inner_request.unreadable(f"messages.{place}", error) from error
        if [turn["role"] for turn in (*messages[-1:], *converted)] == ["assistant", "assistant"]:
            messages[-1] = _combined(messages[-1], *converted)
        else:
            messages += converted
    if not messages:
        raise BadRequest("messages: none of them has content", param="messages")
    return inner_request.merge_system_messages(_with_reminders(messages))


def _continuation(messages: Sequence[Json]) -> Json:
    """Return the fields with which vLLM continues a final assistant text ("prefill"), as Anthropic's API does."""
    last = messages[-1]
    if last["role"] != "assistant" or not last["content"] or "tool_calls" in last or "reasoning" in last:
        return {}
    return {"add_generation_prompt": False, "continue_final_message": True}


def _with_reminders(messages: Sequence[Json]) -> list[Json]:
    """Move system messages that are not at the beginning, as Claude Code sends them, into user turns.

    Many chat templates reject or drop such a message.
    """
    result: list[Json] = []
    for message in messages:
        first = all(earlier["role"] == "system" for earlier in result)
        if message["role"] != "system" or first or not isinstance(message["content"], str):
            result.append(message)
            continue
        reminder = f"<system-reminder>\n{message['content']}\n</system-reminder>"
        if result[-1]["role"] != "user":
            result.append({"role": "user", "content": reminder})
        elif isinstance(before := result[-1]["content"], str):
            result[-1] = {"role": "user", "content": f"{before}\n\n{reminder}"}
        else:
            result[-1] = {"role": "user", "content": [*before, {"type": "text", "text": reminder}]}
    return result


def _converted(message: Json) -> list[Json]:
    role, blocks = message["role"], _blocks(message["content"])
    if role == "assistant":
        return [_assistant(blocks)]
    if role in ("user", "system"):
        return _turn(role, blocks)
    raise BadRequest(f"messages: a role must be user, assistant or system, not {role!r}", param="messages")


def template_fields(body: Json) -> Json | None:
    """Return the chat template's fields for thinking."""
    fields: Json | None = body.get("chat_template_kwargs")
    thinking = (body.get("thinking") or {}).get("type")
    return fields if fields or not thinking else {"enable_thinking": thinking != "disabled"}


def _blocks(content: Any) -> list[Json]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _part(block: Json, role: str) -> Json:
    if block["type"] == "search_result":
        return {"type": "text", "text": _titled(block, block["source"], _texts(block["content"]))}
    source = block.get("source") or {}
    match block["type"], source.get("type"):
        case "text", _:
            return {"type": "text", "text": block["text"]}
        case "image", "url":
            return inner_request.image(source["url"])
        case "image", "base64":
            return inner_request.image(f"data:{source['media_type']};base64,{source['data']}")
        case "document", "text":
            return {"type": "text", "text": _titled(block, source["data"])}
        case "document", "content":
            return {"type": "text", "text": _titled(block, _texts(source["content"]))}
        case kind, None:
            raise BadRequest(f"messages: a {kind} block in a {role} message is not supported", param="messages")
        case kind, source_kind:
            raise BadRequest(f"messages: a {kind} block of a {source_kind} source is not supported", param="messages")


def _titled(block: Json, *texts: str) -> str:
    """Return the text of a document below its title and context, if it has them."""
    return "\n".join(part for part in (block.get("title"), block.get("context"), *texts) if part)


def _texts(content: Any) -> str:
    """Return the text of blocks. Raises BadRequest if one is not text."""
    text = inner_request.joined([_part(block, "user") for block in _blocks(content)], "\n")
    if not isinstance(text, str):
        raise BadRequest("messages: documents may contain text only", param="messages")
    return text


def _assistant(blocks: Sequence[Json]) -> Json:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        match block["type"]:
            case "text":
                texts.append(block["text"])
            case "thinking":
                thoughts.append(block["thinking"])
            case "redacted_thinking":
                pass  # encrypted for Anthropic's servers
            case "tool_use":
                calls.append(inner_request.called(block["id"], block["name"], _arguments(block["input"])))
            case kind:
                raise BadRequest(f"messages: a {kind} block in an assistant message is not supported")
    message: Json = {"role": "assistant", "content": "".join(texts) or None}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _combined(first: Json, second: Json) -> Json:
    """Return two consecutive assistant messages as one turn, as Anthropic's API reads them."""
    message = {**first, **second, "content": (first["content"] or "") + (second["content"] or "") or None}
    for name in ("reasoning", "tool_calls"):
        if name in first and name in second:
            message[name] = first[name] + second[name]
    return message


def _arguments(value: Json) -> str:
    if list(value) == [UNREADABLE]:
        return str(value[UNREADABLE])
    return msgspec.json.encode(value).decode()


def _turn(role: str, blocks: Sequence[Json]) -> list[Json]:
    """Return each tool result of a turn as a message, then the rest of the turn."""
    messages: list[Json] = []
    rest: list[Json] = []
    pictures: list[Json] = []  # of tool results, because tool messages are text
    for block in blocks:
        if block["type"] != "tool_result":
            rest.append(block)
            continue
        parts = [_part(part, "user") for part in _blocks(block.get("content") or "")]
        text = "\n".join(part["text"] for part in parts if part["type"] == "text")
        pictures += [part for part in parts if part["type"] != "text"]
        content = f"Error: {text}" if block.get("is_error") else text
        messages.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": content})
    if parts := [*pictures, *(_part(block, role) for block in rest)]:
        whole = inner_request.content_of(parts) if role == "user" else inner_request.joined(parts, "\n")
        messages.append({"role": role, "content": whole})
    return messages


def _tools(body: Json) -> list[Json]:
    return anthropic_tools.functions(list(body.get("tools") or ()))


def _tool_choice(choice: Json) -> Any:
    kind = choice.get("type")
    with inner_request.named("tool_choice"):
        if kind == "tool":
            return {"type": "function", "function": {"name": choice["name"]}}
        if kind not in _CHOICES:
            raise BadRequest(f"tool_choice.type: must be auto, any, tool or none, not {kind!r}", param="tool_choice")
        return _CHOICES[kind]


def _response_format(body: Json) -> Json | None:
    wanted, where = (body.get("output_config") or {}).get("format"), "output_config.format"
    if not wanted:
        wanted, where = body.get("output_format"), "output_format"
    if not wanted:
        return None
    with inner_request.named(where):
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted["schema"]}}
