"""A request to /v1/messages as a chat request.

Thinking becomes the reasoning of its message. Tool results become tool messages before the rest of their turn. Images
stay in place, text documents become text, and later system messages become reminders in a user turn. Claude Code's
attribution is left out. What vLLM cannot serve is rejected by name. Tools that Anthropic's servers run are left out,
because the model cannot call them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ratchet.proxy.dialects import anthropic_tools, inner_request
from ratchet.proxy.dialects.inner_request import AssistantTurn, ChatMessages, Json
from ratchet.proxy.errors import BadRequest
from ratchet.proxy.wire import lax_values
from ratchet.proxy.wire.request_body import ChatRequest
from ratchet.store.content import messages as canon

UNREADABLE = "unreadable_arguments"  # the one member of an `input` with arguments that are not JSON

_TYPES: dict[str, Sequence[type[Any]]] = {
    "messages": (list,), "system": (str, list), "tools": (list,), "thinking": (dict,), "output_config": (dict,),
    "output_format": (dict,), "tool_choice": (dict,),
}  # fmt: skip
_ATTRIBUTION = "x-anthropic-billing-header"
_MIN_BUDGET = 1024  # tokens, of thinking; vLLM's limit
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def read(body: Json) -> ChatRequest:
    """Return the inner chat request. Raises BadRequest."""
    if body.get("thread"):
        # The SDK's tool runner then sends the whole conversation instead.
        raise BadRequest("`thread` is not supported: send the whole conversation", code="thread_unsupported_request")
    inner_request.require(body, "max_tokens", "messages")
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
        "reasoning_effort": (body.get("output_config") or {}).get("effort"),
        **_thinking(body),
        "response_format": _response_format(body),
        **_continuation(messages),
    }
    return inner_request.chat_request(body, messages, fields)


def count_body(body: Json, served_name: str) -> Json:
    """Return the body for vLLM's /tokenize: with the prompt of the call itself. Raises BadRequest."""
    inner_request.require(body, "messages")
    messages = chat_messages(body)
    effort = _thinking(body).get("reasoning_effort") or (body.get("output_config") or {}).get("effort")
    template_fields: Json = _thinking(body).get("chat_template_kwargs") or body.get("chat_template_kwargs") or {}
    if effort is not None:  # /tokenize has no such field: what vLLM makes of it in a call
        template_fields = {"enable_thinking": effort != "none", **template_fields, "reasoning_effort": effort}
    fields = {
        "tools": _tools(body) or None,
        "chat_template_kwargs": template_fields or None,
        **_continuation(messages),
    }
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
            parts = [_part(block, "system") for block in _system_blocks(system)]
            if content := inner_request.joined(parts, ""):  # as vLLM does
                messages.append({"role": "system", "content": content})
    turns = inner_request.ChatMessages()
    for place, message in enumerate(body["messages"]):
        with inner_request.named(f"messages.{place}"):
            _add(turns, message)
    messages += turns.joined()
    if not messages:
        raise BadRequest("messages: none of them has content", param="messages")
    return canon.with_one_system_message(messages)


def _continuation(messages: Sequence[Json]) -> Json:
    """Return the fields with which vLLM continues a final assistant text ("prefill"), as Anthropic's API does."""
    last = messages[-1]
    if last["role"] != "assistant" or not last["content"] or "tool_calls" in last or "reasoning" in last:
        return {}
    return {"add_generation_prompt": False, "continue_final_message": True}


def _add(turns: ChatMessages, message: Json) -> None:
    role, content = message["role"], message["content"]
    if role == "assistant":
        _add_answer(turns.assistant(), _blocks(content))
    elif role == "user":
        _add_turn(turns, _blocks(content))
    elif role == "system":
        texts = [block for block in _system_blocks(_blocks(content)) if block["type"] not in anthropic_tools.CHANGES]
        if parts := [_part(block, role) for block in texts]:
            turns.add({"role": role, "content": inner_request.joined(parts, "\n")})
    else:
        raise BadRequest(f"messages: a role must be user, assistant or system, not {role!r}", param="messages")


def _thinking(body: Json) -> Json:
    """Return the fields for thinking, as vLLM does: a budget of tokens, none, or what the model chooses.

    Raises BadRequest.
    """
    thinking = body.get("thinking") or {}
    kind, budget = thinking.get("type"), thinking.get("budget_tokens")
    if kind == "disabled":
        return {"reasoning_effort": "none"}
    if kind == "adaptive" or not thinking:
        return {}
    if kind != "enabled":
        raise BadRequest(f"thinking.type: must be enabled, disabled or adaptive, not {kind!r}", param="thinking.type")
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < _MIN_BUDGET:
        raise BadRequest(
            f"thinking.budget_tokens: must be a number of {_MIN_BUDGET} tokens or more, not {budget!r}",
            param="thinking.budget_tokens",
        )
    most = lax_values.lax_int(body.get("max_tokens"))
    if most is not None and budget >= most:
        raise BadRequest(
            f"thinking.budget_tokens: {budget} must be less than max_tokens, which is {most}",
            param="thinking.budget_tokens",
        )
    template_fields = {"enable_thinking": True, **(body.get("chat_template_kwargs") or {})}
    return {"thinking_token_budget": budget, "chat_template_kwargs": template_fields}


def _blocks(content: Any) -> list[Json]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _system_blocks(system: Any) -> list[Json]:
    """Return the blocks of a system prompt without Claude Code's attribution, as vLLM does.

    It is another one in every request: no two prompts would have the same beginning.
    """
    if isinstance(system, str):
        return _blocks(system)
    return [block for block in system if block["type"] != "text" or not block["text"].startswith(_ATTRIBUTION)]


def _part(block: Json, role: str) -> Json:
    if block["type"] == "search_result":
        return {"type": "text", "text": _titled(block, block["source"], _texts(block["content"]))}
    if block["type"] == "tool_reference":  # in a tool's result: a tool that a tool search found
        return {"type": "text", "text": f"tool_reference: {block.get('tool_name') or block['name']}"}
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


def _add_answer(turn: AssistantTurn, blocks: Sequence[Json]) -> None:
    texts, thoughts = [], []
    for block in blocks:
        match block["type"]:
            case "text":
                texts.append(block["text"])
            case "thinking":
                thoughts.append(block["thinking"])
            case "redacted_thinking" | "tool_reference":
                pass  # encrypted for Anthropic's servers; a name without its tool result
            case "tool_use":
                turn.calls.append(inner_request.called(block["id"], block["name"], _arguments(block["input"])))
            case kind:
                raise BadRequest(f"messages: a {kind} block in an assistant message is not supported")
    turn.texts.append("".join(texts))
    turn.thoughts += ["".join(thoughts)] if thoughts else []


def _arguments(value: Json) -> str:
    if list(value) == [UNREADABLE]:
        return str(value[UNREADABLE])
    return msgspec.json.encode(value).decode()


def _add_turn(turns: ChatMessages, blocks: Sequence[Json]) -> None:
    """Add each tool result of a user's turn as a message, then the rest of the turn."""
    rest: list[Json] = []
    pictures: list[Json] = []  # of tool results, because tool messages are text
    for block in blocks:
        if block["type"] != "tool_result":
            rest += [block] if block["type"] != "tool_reference" else []
            continue
        parts = [_part(part, "user") for part in _blocks(block.get("content") or "")]
        text = "\n".join(part["text"] for part in parts if part["type"] == "text")
        pictures += [part for part in parts if part["type"] != "text"]
        content = f"Error: {text}" if block.get("is_error") else text
        turns.add({"role": "tool", "tool_call_id": block["tool_use_id"], "content": content})
    if parts := [*pictures, *(_part(block, "user") for block in rest)]:
        turns.add({"role": "user", "content": inner_request.content_of(parts)})


def _tools(body: Json) -> list[Json]:
    return anthropic_tools.functions(body.get("tools") or (), body["messages"])


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
