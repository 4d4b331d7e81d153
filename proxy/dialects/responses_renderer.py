"""Renders an answer as the events and objects of the Responses API."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from ratchet.proxy.dialects.content_blocks import Block, BlockRenderer, Event, Kind, TokenCounts
from ratchet.proxy.dialects.dialect import policy_name
from ratchet.proxy.dialects.inner_request import Json
from ratchet.proxy.errors import ProxyError
from ratchet.store.records import CallStarted

_ECHOED: Json = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "temperature": 1.0,
    "tool_choice": "auto",
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
_CODES = ("context_length_exceeded", "rate_limit_exceeded")  # codes that clients act on
_PREFIX = {Kind.REASONING: "rs", Kind.TEXT: "msg", Kind.REFUSAL: "msg", Kind.CALL: "fc"}
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}  # finish reason -> its name here


class ResponseRenderer(BlockRenderer):
    """Renders one response. The response repeats the settings of `body`, the request.

    `custom`: the names of custom tools. `spaces`: tool name -> namespace.
    """

    def __init__(self, start: CallStarted, body: Json, custom: frozenset[str], spaces: Mapping[str, str]) -> None:
        super().__init__()
        self._id = response_id(start.call_id)
        self._custom = custom
        self._spaces = spaces
        self._number = 0
        self._status = "in_progress"
        self._error: Json | None = None
        self._ended_at: int | None = None
        self._fixed = _ECHOED | {name: body[name] for name in _ECHOED if body.get(name) is not None}
        self._fixed |= {
            "created_at": int(start.started_at),
            "model": policy_name(start),
            "reasoning": {"effort": None, "summary": None} | (body.get("reasoning") or {}),
            "text": _echoed_text(body.get("text") or {}),
            "tools": [_echoed_tool(tool) for tool in body.get("tools") or ()],
            "background": False,
            "frequency_penalty": body.get("frequency_penalty") or 0.0,
            "presence_penalty": body.get("presence_penalty") or 0.0,
        }

    def started(self) -> list[Event]:
        """Return the start of an empty response."""
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=self.answer()) for kind in kinds]

    def opened(self, block: Block) -> list[Event]:
        """Return the start of an empty item."""
        item = self._item(block, "in_progress")
        if block.kind == Kind.CALL:
            return [self._event("response.output_item.added", output_index=block.place, item=item)]
        added = self._event("response.output_item.added", output_index=block.place, item=item | {"content": []})
        return [added, self._of(block, "response.content_part.added", content_index=0, part=item["content"][0])]

    def grew(self, block: Block, piece: str) -> list[Event]:
        """Return the delta of an item. A custom tool's input is sent when complete: vLLM wraps it in JSON."""
        if block.kind == Kind.REASONING:
            return [self._of(block, "response.reasoning_text.delta", content_index=0, delta=piece)]
        if block.kind == Kind.REFUSAL:
            return [self._of(block, "response.refusal.delta", content_index=0, delta=piece)]
        if block.kind == Kind.TEXT:
            return [self._of(block, "response.output_text.delta", content_index=0, delta=piece, logprobs=self.sampled)]
        if block.name in self._custom:
            return []
        return [self._of(block, "response.function_call_arguments.delta", delta=piece)]

    def closed(self, block: Block) -> list[Event]:
        """Return the end of an item, complete or cut off."""
        item = self._item(block, self._item_status(block))
        events = []
        if self._is_custom(block):
            events.append(self._of(block, "response.custom_tool_call_input.delta", delta=item["input"]))
            events.append(self._of(block, "response.custom_tool_call_input.done", input=item["input"]))
        elif block.kind == Kind.CALL:
            call = {"name": block.name, "arguments": block.text}
            events.append(self._of(block, "response.function_call_arguments.done", **call))
        else:
            kind, fields = _end_of_text(block)
            events.append(self._of(block, kind, content_index=0, **fields))
            part = item["content"][0]
            events.append(self._of(block, "response.content_part.done", content_index=0, part=part))
        return [*events, self._event("response.output_item.done", output_index=block.place, item=item)]

    def ended(self) -> list[Event]:
        """Return the end of the response, complete or cut off at max_tokens or by a filter."""
        self._status = "incomplete" if self.finish_reason in _INCOMPLETE else "completed"
        self._ended_at = int(time.time())
        return [self._event(f"response.{self._status}", response=self.answer())]

    def failed(self, error: ProxyError) -> list[Event]:
        """Return the failed response."""
        self._status = "failed"
        code = error.code if error.code in _CODES else "server_error"
        self._error = {"code": code, "message": error.for_client}
        return [self._event("response.failed", response=self.answer())]

    def answer(self) -> Json:
        """Return the response object."""
        cut = _INCOMPLETE.get(self.finish_reason or "") if self._status == "incomplete" else None
        return {
            "id": self._id,
            "object": "response",
            "status": self._status,
            "completed_at": self._ended_at if self._status == "completed" else None,
            "error": self._error,
            "incomplete_details": {"reason": cut} if cut else None,
            "output": [self._item(block, self._item_status(block)) for block in self.blocks],
            "usage": _usage(self.usage) if self.usage else None,
            **self._fixed,
        }

    def _item_status(self, block: Block) -> str:
        last = block is self.blocks[-1]
        if last and self._status == "failed":
            return "incomplete"
        return "incomplete" if last and self.finish_reason in _INCOMPLETE else "completed"

    def _item(self, block: Block, status: str) -> Json:
        name = self._item_id(block)
        if block.kind == Kind.REASONING:
            content = [{"type": "reasoning_text", "text": block.text}]
            return {"id": name, "type": "reasoning", "summary": [], "content": content}
        if block.kind != Kind.CALL:
            part: Json = {"type": "refusal", "refusal": block.text}
            if block.kind == Kind.TEXT:
                part = {"type": "output_text", "text": block.text, "annotations": [], "logprobs": block.logprobs}
            return {"id": name, "type": "message", "role": "assistant", "status": status, "content": [part]}
        call = {"id": name, "call_id": block.id, "name": block.name, "status": status}
        if block.name in self._spaces:
            call["namespace"] = self._spaces[block.name]
        if self._is_custom(block):
            return {**call, "type": "custom_tool_call", "input": _input(block.text)}
        return {**call, "type": "function_call", "arguments": block.text}

    def _of(self, block: Block, kind: str, **fields: Any) -> Event:
        return self._event(kind, item_id=self._item_id(block), output_index=block.place, **fields)

    def _item_id(self, block: Block) -> str:
        prefix = "ctc" if self._is_custom(block) else _PREFIX[block.kind]
        return f"{prefix}_{self._id.removeprefix('resp_')}_{block.place}"

    def _is_custom(self, block: Block) -> bool:
        return block.kind == Kind.CALL and block.name in self._custom

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event


def _end_of_text(block: Block) -> tuple[str, Json]:
    """Return the event that ends a text, and its fields."""
    if block.kind == Kind.REASONING:
        return "response.reasoning_text.done", {"text": block.text}
    if block.kind == Kind.REFUSAL:
        return "response.refusal.done", {"refusal": block.text}
    return "response.output_text.done", {"text": block.text, "logprobs": block.logprobs}


def _usage(usage: TokenCounts) -> Json:
    """Return the usage; `input_tokens` counts what came from the cache, too."""
    prompt, completion = usage.prompt_tokens or 0, usage.completion_tokens or 0
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": usage.thought},
        "total_tokens": prompt + completion if usage.total_tokens is None else usage.total_tokens,
    }


def _echoed_text(text: Json) -> Json:
    """Return the settings of texts, the format with all of its fields."""
    given = text.get("format") or {"type": "text"}
    if given.get("type") == "json_schema":
        given = {"description": None} | given | {"strict": given.get("strict") or False}
    return text | {"format": given}


def _echoed_tool(tool: Json) -> Json:
    return {"strict": None, "description": None} | tool if tool["type"] == "function" else tool


def _input(arguments: str) -> str:
    """Unwrap a custom tool's input; return the text unchanged if it is not wrapped."""
    try:
        return str(msgspec.json.decode(arguments, type=dict[str, Any])["input"]) if arguments else ""
    except (msgspec.DecodeError, KeyError, RecursionError):
        return arguments


def response_id(call_id: str) -> str:
    """Return the response id of a call."""
    return "resp_" + call_id.removeprefix("call_")
