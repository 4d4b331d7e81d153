"""Builds the inner chat call of the other dialects from translated messages and fields.

Sampling fields that vLLM knows and the dialect does not (`min_p`, `seed`, ...) pass through under their own names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from ratchet.proxy.errors import BadRequest
from ratchet.proxy.wire import lax_values, request_body
from ratchet.proxy.wire.request_body import ChatRequest
from ratchet.proxy.wire.unreadable_text import unreadable_body

_PASSED = (
    "seed", "min_p", "top_k", "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "stop",
    "stop_token_ids", "logit_bias", "ignore_eos", "structured_outputs", "chat_template_kwargs",
)  # fmt: skip

_TYPE_NAMES: dict[type[Any], str] = {str: "a text", list: "a list", dict: "an object"}

Json = dict[str, Any]

_fields = msgspec.json.Decoder(dict[str, Any])


def decode(body: bytes) -> Json:
    """Return a request body as an object. Raises BadRequest."""
    try:
        return _fields.decode(body)
    except msgspec.DecodeError as error:
        raise unreadable_body(body, error) from error


def check_types(body: Json, types: Mapping[str, Sequence[type[Any]]]) -> None:
    """Raise BadRequest for the first field that has a value of none of its types."""
    for name, kinds in types.items():
        if (value := body.get(name)) and not isinstance(value, tuple(kinds)):
            raise BadRequest(f"{name}: must be {' or '.join(_TYPE_NAMES[kind] for kind in kinds)}", param=name)


def chat_request(body: Json, messages: Sequence[Json], fields: Mapping[str, Any]) -> ChatRequest:
    """Return the chat request for a translated body; fields that are None are left out. Raises BadRequest."""
    chosen: Json = {name: value for name, value in fields.items() if value is not None}
    chosen = {name: body[name] for name in _PASSED if body.get(name) is not None} | chosen
    if lax_values.lax_bool(body.get("stream")):
        chosen |= {"stream": True, "stream_options": {"include_usage": True}}
    inner = request_body.read(msgspec.json.encode({"model": body.get("model"), "messages": messages, **chosen}))
    metadata = body.get("metadata")
    if isinstance(metadata, dict):
        inner.trajectory = _text(metadata.get("trajectory_id"))
    inner.user = _text(body.get("user")) or _text(metadata.get("user_id") if isinstance(metadata, dict) else None)
    return inner


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def require(body: Json, *names: str) -> None:
    """Raise BadRequest for the first missing field."""
    for name in names:
        if body.get(name) is None:
            raise BadRequest(f"{name}: field required", param=name)


def unreadable(where: str, error: Exception) -> BadRequest:
    """Return the error for a part of the body with the wrong type."""
    wrong_type = "not an object, or one of its fields has the wrong type"
    reason = f"{error} is missing" if isinstance(error, KeyError) else wrong_type
    return BadRequest(f"{where}: {reason}", param=where)


@contextmanager
def named(where: str) -> Iterator[None]:
    """Turn the error of a part with the wrong type into BadRequest."""
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        raise unreadable(where, error) from error


def content_of(parts: Sequence[Json]) -> str | list[Json]:
    """Return chat content: one text as such, else the parts, which vLLM's chat template puts together."""
    return list(parts) if len(parts) > 1 else joined(parts, "")


def joined(parts: Sequence[Json], separator: str) -> str | list[Json]:
    """Return chat content: plain text where all parts are text, else the parts."""
    if all(part["type"] == "text" for part in parts):
        return separator.join(part["text"] for part in parts)
    return list(parts)


def image(url: str, detail: str | None = None) -> Json:
    """Return an image as a chat content part. The proxy never opens the URL."""
    return {"type": "image_url", "image_url": {"url": url, **({"detail": detail} if detail else {})}}


def function(name: str, description: str | None, parameters: Any, strict: Any, defer_loading: Any = None) -> Json:
    """Return a tool in the chat format."""
    given = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    given["defer_loading"] = defer_loading  # for the chat template
    return {"type": "function", "function": {key: value for key, value in given.items() if value is not None}}


def called(call_id: str, name: str, arguments: str) -> Json:
    """Return a tool call in the chat format."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


class ChatMessages:
    """Chat messages that are added one by one. What belongs to one turn of the assistant is joined once."""

    def __init__(self) -> None:
        self._messages: list[Json | AssistantTurn] = []

    def add(self, *messages: Json) -> None:
        """Add messages of other roles."""
        self._messages += messages

    def assistant(self) -> AssistantTurn:
        """Return the assistant's turn that goes on; a new one after a message of another role."""
        last = self._messages[-1] if self._messages else None
        if not isinstance(last, AssistantTurn):
            self._messages.append(last := AssistantTurn())
        return last

    def joined(self) -> list[Json]:
        """Return the messages."""
        return [one.message() if isinstance(one, AssistantTurn) else one for one in self._messages]


class AssistantTurn:
    """The parts of one assistant message: texts, reasoning, and tool calls in the chat format."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        self.calls: list[Json] = []

    def message(self) -> Json:
        """Return the chat message."""
        message: Json = {"role": "assistant", "content": "".join(self.texts) or None}
        if self.thoughts:
            message["reasoning"] = "".join(self.thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        return message
