"""A chat request, read once: what the client asked for, and the body that goes to vLLM in its place.

Promises: fields that the proxy does not know reach vLLM byte for byte; the messages are never changed. Only the
first level is taken apart; everything else stays raw JSON until it is needed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import Raw

from ratchet.proxy.errors import BadRequest
from ratchet.proxy.wire import lax_values
from ratchet.proxy.wire.message_history import MessageReader
from ratchet.store.content import messages as canon
from ratchet.store.records import MessageNode

SAMPLING = frozenset((
    "temperature", "top_p", "top_k", "min_p", "seed", "n", "stop", "stop_token_ids", "max_tokens",
    "max_completion_tokens", "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "ignore_eos", "tool_choice", "parallel_tool_calls", "response_format", "structured_outputs",
    "chat_template_kwargs", "allowed_token_ids", "bad_words", "guided_choice", "guided_grammar", "guided_json",
    "guided_regex", "thinking_token_budget", "reasoning_effort", "vllm_xargs", "repetition_detection", "watermarking",
))  # fmt: skip

_ALIEN_PARTS = ("image_url", "input_image", "image", "input_audio", "audio_url", "video_url", "file")

_fields = msgspec.json.Decoder(dict[str, Raw])
_history = MessageReader()
_encode = msgspec.json.Encoder().encode

_LARGE = 4096  # bytes; of a larger sampling parameter only the presence is recorded

_LONG_NUMBER = re.compile(rb"[0-9]{19}")  # it may have more than 64 bits
_CACHED_TOOLS = 256 * 1024  # bytes

_TRUE = Raw(b"true")
_ZERO = Raw(b"0")


class ChatRequest(msgspec.Struct):
    """One request as it came in. `asks_*` say which of the captured fields the client wants for itself.

    The messages are shared with other requests of the same history: nobody changes them.
    """

    fields: dict[str, Raw]
    model: str
    messages: list[dict[str, Any]]
    streamed: bool
    asks_ids: bool
    asks_logprobs: bool
    asks_usage: bool
    stream_options: dict[str, Any] = msgspec.field(default_factory=dict)
    sampling: Mapping[str, Any] = msgspec.field(default_factory=dict)
    tools_hash: str = ""
    tools: bytes = b""
    strict_tools: bool = False  # one of them is `strict`
    trajectory: str | None = None
    follows: tuple[str, str] | None = None  # trajectory and call that the client says it continues
    untrainable: str | None = None
    nodes: tuple[MessageNode, ...] = ()
    keys: tuple[str, ...] = ()  # link keys of the messages

    def outgoing(self, served_name: str) -> bytes:
        """Return the body for vLLM: the served model, and the request for ids, logprobs and usage."""
        return _encode(self.outgoing_fields(served_name))

    def outgoing_fields(self, served_name: str) -> dict[str, Raw]:
        """Return the first level of the body for vLLM."""
        fields = dict(self.fields)
        fields["model"] = Raw(_encode(served_name))
        fields["return_token_ids"] = _TRUE
        fields["logprobs"] = _TRUE
        fields.setdefault("top_logprobs", _ZERO)
        if self.streamed:
            fields["stream_options"] = Raw(_encode({**self.stream_options, "include_usage": True}))
        return fields


def read(body: bytes) -> ChatRequest:
    """Return the request in a JSON body. Raises BadRequest with the field that is wrong."""
    fields = fields_of(body)
    model = model_in(fields)
    try:
        history = _history.read(fields["messages"])
    except KeyError:
        raise BadRequest("`messages` is missing", param="messages") from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"`messages` must be a list of objects: {error}", param="messages") from error
    if not history:
        raise BadRequest("`messages` is empty", param="messages")
    messages = [said.message for said in history]
    asks_logprobs = is_true(fields, "logprobs")
    if "top_logprobs" in fields and not asks_logprobs:
        _check_top_logprobs(fields)
    streamed, options = stream_in(fields)
    tools_hash, tools, strict = _tools_in(fields)
    return ChatRequest(
        fields=fields,
        model=model,
        messages=messages,
        streamed=streamed,
        asks_ids=is_true(fields, "return_token_ids"),
        asks_logprobs=asks_logprobs,
        asks_usage="include_usage" in options and lax_values.lax_bool(options["include_usage"]) is True,
        stream_options=options,
        sampling=sampling_in(fields),
        tools_hash=tools_hash,
        tools=tools,
        strict_tools=strict,
        trajectory=trajectory_in(fields),
        untrainable=untrainable_by(fields, messages),
        nodes=tuple([said.node for said in history]),
        keys=tuple([said.key for said in history]),
    )


def _check_top_logprobs(fields: Mapping[str, Raw]) -> None:
    """Raise BadRequest as vLLM does, which would not see it: it is always asked for logprobs."""
    if value(fields, "top_logprobs") not in (None, 0):
        raise BadRequest("`top_logprobs` needs `logprobs` to be true", param="top_logprobs")


def fields_of(body: bytes) -> dict[str, Raw]:
    """Return the first level of a JSON body. Raises BadRequest."""
    try:
        return _fields.decode(body)
    except msgspec.DecodeError as error:
        raise BadRequest(f"the body is not a JSON object: {error}") from error


def model_in(fields: Mapping[str, Raw]) -> str:
    """Return the model's name. Raises BadRequest."""
    model = value(fields, "model")
    if not isinstance(model, str) or not model:
        raise BadRequest("`model` must be the name of a model", param="model")
    return model


def stream_in(fields: Mapping[str, Raw]) -> tuple[bool, dict[str, Any]]:
    """Return whether a stream is asked for, and its options."""
    streamed = is_true(fields, "stream")
    options = value(fields, "stream_options") if streamed else None
    return streamed, options if isinstance(options, dict) else {}


def sampling_in(fields: Mapping[str, Raw]) -> dict[str, Any]:
    """Return the sampling parameters as they were sent; `True` in place of one that is too large for a record."""
    return {name: _sampled_by(bytes(raw)) for name, raw in fields.items() if name in SAMPLING}


def _sampled_by(raw: bytes) -> Any:
    found = msgspec.json.decode(raw) if len(raw) <= _LARGE else True
    if len(raw) > 18 and _LONG_NUMBER.search(raw):
        try:
            msgspec.msgpack.encode(found)
        except OverflowError:
            return True
    return found


def value(fields: Mapping[str, Raw], name: str) -> Any:
    """Return a field decoded; None where it is absent."""
    return msgspec.json.decode(fields[name]) if name in fields else None


def is_true(fields: Mapping[str, Raw], name: str) -> bool:
    """Return whether a field is what vLLM reads as true."""
    return name in fields and lax_values.lax_bool(msgspec.json.decode(fields[name])) is True


def _tools_in(fields: Mapping[str, Raw]) -> tuple[str, bytes, bool]:
    """Return (hash, canonical JSON, strict) of the tool list; only lists of a usual size are kept for the next call."""
    raw = bytes(fields.get("tools", b""))
    if not raw:
        return "", b"", False
    return _tools(raw) if len(raw) <= _CACHED_TOOLS else _tools.__wrapped__(raw)


@lru_cache(maxsize=64)
def _tools(raw: bytes) -> tuple[str, bytes, bool]:
    """Return (hash, canonical JSON, whether a tool is strict) of a tool list; agents send the same with every call."""
    tools = msgspec.json.decode(raw)
    return *canon.tools_hash(tools), isinstance(tools, list) and any(map(_is_strict, tools))


def _is_strict(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and lax_values.lax_bool(function.get("strict")) is True


def trajectory_in(fields: Mapping[str, Raw]) -> str | None:
    """Return the trajectory that the body's metadata names."""
    metadata = value(fields, "metadata")
    named = metadata.get("trajectory_id") if isinstance(metadata, dict) else None
    return named if isinstance(named, str) and named else None


def untrainable_by(fields: Mapping[str, Raw], messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Return why the answer's tokens may not be trained, as far as the request tells."""
    if is_true(fields, "echo"):
        return "echo"
    if is_true(fields, "use_beam_search"):
        return "beam_search"
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            for part in content:
                if isinstance(part, dict) and part.get("type") in _ALIEN_PARTS:
                    return "image" if "image" in str(part["type"]) else str(part["type"])
    return None
