"""A chat request, parsed once: what the client asked for, and the body that is sent to vLLM.

Promises: fields that the proxy does not know reach vLLM byte for byte; messages change only by `with_prompt`. Only the
first level is decoded; everything else stays raw JSON until it is needed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import msgspec
from msgspec import Raw

from ratchet.proxy.errors import BadRequest
from ratchet.proxy.wire import lax_values
from ratchet.proxy.wire.body_bounds import BodyBounds
from ratchet.proxy.wire.message_history import ListLimits, MessageReader
from ratchet.proxy.wire.unreadable_text import unreadable_body
from ratchet.store.content import json_depth
from ratchet.store.content import messages as canon
from ratchet.store.content.messages import beginning, has_system_prompt
from ratchet.store.records import MessageNode, Prompt

SAMPLING = frozenset((
    "temperature", "top_p", "top_k", "min_p", "seed", "n", "stop", "stop_token_ids", "max_tokens",
    "max_completion_tokens", "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "ignore_eos", "tool_choice", "parallel_tool_calls", "response_format", "structured_outputs",
    "chat_template_kwargs", "allowed_token_ids", "bad_words", "guided_choice", "guided_grammar", "guided_json",
    "guided_regex", "thinking_token_budget", "reasoning_effort", "vllm_xargs", "repetition_detection", "watermarking",
))  # fmt: skip

_fields = msgspec.json.Decoder(dict[str, Raw])
_raws = msgspec.json.Decoder(list[Raw])
_reader = MessageReader()
_encode = msgspec.json.Encoder().encode

_MAX_SAMPLING_BYTES = 4096  # of a larger sampling parameter only the presence is recorded

_LONG_NUMBER = re.compile(rb"[0-9]{19}")  # may exceed 64 bits
_MAX_CACHED_TOOLS = 256 * 1024  # bytes
_LONG = 16 * 1024  # bytes; the bounds of a shorter body cost little

_DEEPEST = 200  # the largest value of the setting max_json_depth

_TRUE = Raw(b"true")
_ZERO = Raw(b"0")


def _always(text: str) -> bool:
    return True


class FollowedCall(NamedTuple):
    """The call that a request continues, by `previous_response_id`."""

    trajectory_id: str
    call_id: str
    alias: str
    purpose: str = "live"  # of its trajectory


class ChatRequest(msgspec.Struct):
    """One request as received. `asks_*`: which of the captured fields the client requested.

    The messages are shared with other requests of the same history and must not be changed.
    """

    is_chat: ClassVar[bool] = True  # has chat messages: a system prompt can be substituted, sampled ids continued

    fields: dict[str, Raw]
    model: str  # empty if the client names none
    messages: Sequence[dict[str, Any]]
    streamed: bool
    asks_ids: bool
    asks_logprobs: bool
    asks_usage: bool
    adds_logprobs: bool = True  # for the record, if the client did not ask for them
    stream_options: dict[str, Any] = msgspec.field(default_factory=dict)
    sampling: Mapping[str, Any] = msgspec.field(default_factory=dict)
    tools_hash: str = ""
    tools: bytes = b""
    strict_tools: bool = False  # one of them is `strict`
    trajectory: str | None = None
    user: str | None = None  # the end user
    follows: FollowedCall | None = None  # that the client names
    untrainable: str | None = None
    nodes: Sequence[MessageNode] = ()
    hashes: tuple[str, ...] = ()  # of the nodes
    keys: tuple[str, ...] = ()  # link keys of the messages
    answer_digests: bytes = b""  # of the assistant messages, one after the other
    has_other_system: bool = False  # a `developer`, or a system message that is not the first message
    leading_system: int = 0  # number of system messages at the beginning
    plain_tool_calls: bool = True  # those of assistant messages have the standard form
    may_contain: Callable[[str], bool] = _always  # False: no message contains the text

    def outgoing(self, served_name: str) -> bytes:
        """Return the body for vLLM: with the served name, and requesting ids, logprobs and usage."""
        return _encode(self.outgoing_fields(served_name))

    def outgoing_fields(self, served_name: str) -> dict[str, Raw]:
        """Return the first level of the body for vLLM."""
        fields = dict(self.fields)
        fields["model"] = Raw(_encode(served_name))
        fields["return_token_ids"] = _TRUE
        if self.adds_logprobs or self.asks_logprobs:
            fields["logprobs"] = _TRUE
            fields.setdefault("top_logprobs", _ZERO)
        if self.streamed:
            fields["stream_options"] = Raw(_encode({**self.stream_options, "include_usage": True}))
        return fields

    def with_prompt(self, prompt: Prompt, family: str) -> ChatRequest:
        """Return the request with `prompt` substituted for its system prompt; itself if it has no text for `family`.

        All other messages stay byte for byte, and this object stays unchanged: linking and recording use the client's
        messages.
        """
        text = prompt.text_for(family)
        if not text:
            return self
        system = beginning(self.messages, prompt.mode, text)
        replaced = has_system_prompt(self.messages)  # as an int: how many messages it replaces
        raws = [Raw(_encode(system)), *_raws.decode(self.fields["messages"])[replaced:]]
        fields = {**self.fields, "messages": Raw(_encode(raws))}
        return msgspec.structs.replace(self, fields=fields, messages=[system, *self.messages[replaced:]])


def read_within(bounds: BodyBounds, body: bytes, key_id: str, reader: MessageReader = _reader) -> ChatRequest:
    """Return the request in a JSON body that is within the bounds. Raises BodyTooLarge, BadRequest.

    Of a long body only what is new is checked, and `BodyBounds.check` decides where that is not enough.
    """
    if len(body) >= _LONG and bounds.has_few_values(body):
        with contextlib.suppress(Exception):  # of whatever kind: it occurs again below, after the bounds
            return read(body, key_id, reader, bounds)
    bounds.check(body)
    return read(body, key_id, reader)


def read(
    body: bytes, key_id: str = "", reader: MessageReader = _reader, bounds: BodyBounds | None = None
) -> ChatRequest:
    """Return the request in a JSON body. Raises BadRequest that names the invalid field.

    With `bounds`, a body that may exceed them raises any exception.
    """
    fields = fields_of(body)
    if bounds is not None:
        bounds.check_fields(fields, len(body))
    model = model_in(fields)
    try:
        limits = ListLimits(bounds.max_messages, bounds.max_json_depth - 1) if bounds else None
        history = reader.read(fields["messages"], key_id, limits)
    except KeyError:
        raise BadRequest("`messages` is missing", param="messages") from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"`messages` must be a list of objects: {error}", param="messages") from error
    if not history.hashes:
        raise BadRequest("`messages` is empty", param="messages")
    asks_logprobs = is_true(fields, "logprobs")
    if "top_logprobs" in fields and not asks_logprobs:
        _check_top_logprobs(fields)
    streamed, options = stream_in(fields)
    tools = _tools_in(fields)
    if bounds is not None:
        bounds.check_counts(len(history.hashes), tools.length, tools.depth)
    return ChatRequest(
        fields=fields,
        model=model,
        messages=history.messages,
        streamed=streamed,
        asks_ids=is_true(fields, "return_token_ids"),
        asks_logprobs=asks_logprobs,
        asks_usage="include_usage" in options and lax_values.lax_bool(options["include_usage"]) is True,
        stream_options=options,
        sampling=sampling_in(fields),
        tools_hash=tools.hash,
        tools=tools.body,
        strict_tools=tools.is_strict,
        trajectory=trajectory_in(fields),
        user=user_in(fields),
        untrainable=untrainable_by(fields) or history.traits.untrainable,
        nodes=history.nodes,
        hashes=history.hashes,
        keys=history.keys,
        answer_digests=history.answer_digests,
        has_other_system=history.traits.has_other_system,
        leading_system=history.traits.leading_system,
        plain_tool_calls=history.traits.plain_tool_calls,
        may_contain=history.may_contain,
    )


def _check_top_logprobs(fields: Mapping[str, Raw]) -> None:
    """Raise BadRequest as vLLM would; it cannot, since the proxy always requests logprobs."""
    if value(fields, "top_logprobs") not in (None, 0):
        raise BadRequest("`top_logprobs` needs `logprobs` to be true", param="top_logprobs")


def fields_of(body: bytes) -> dict[str, Raw]:
    """Return the first level of a JSON body. Raises BadRequest."""
    try:
        return _fields.decode(body)
    except msgspec.DecodeError as error:
        raise unreadable_body(body, error) from error


def model_in(fields: Mapping[str, Raw]) -> str:
    """Return the model's name, empty if the request names none. Raises BadRequest."""
    model = value(fields, "model")
    if model is not None and not isinstance(model, str):
        raise BadRequest("`model` must be the name of a model", param="model")
    return model or ""


def stream_in(fields: Mapping[str, Raw]) -> tuple[bool, dict[str, Any]]:
    """Return whether the request streams, and its stream options."""
    streamed = is_true(fields, "stream")
    options = value(fields, "stream_options") if streamed else None
    return streamed, options if isinstance(options, dict) else {}


def sampling_in(fields: Mapping[str, Raw]) -> dict[str, Any]:
    """Return the sampling parameters as sent; `True` for one that is too large to record."""
    return {name: _sampled_by(bytes(raw)) for name, raw in fields.items() if name in SAMPLING}


def _sampled_by(raw: bytes) -> Any:
    found = msgspec.json.decode(raw) if len(raw) <= _MAX_SAMPLING_BYTES else True
    if len(raw) > 18 and _LONG_NUMBER.search(raw):
        try:
            msgspec.msgpack.encode(found)
        except OverflowError:
            return True
    return found


def value(fields: Mapping[str, Raw], name: str) -> Any:
    """Return a decoded field; None if absent."""
    return msgspec.json.decode(fields[name]) if name in fields else None


def is_true(fields: Mapping[str, Raw], name: str) -> bool:
    """Return whether vLLM parses a field as true."""
    return name in fields and lax_values.lax_bool(msgspec.json.decode(fields[name])) is True


class ToolList(NamedTuple):
    """A request's tools: their hash and canonical JSON, how many there are, whether one is strict, levels of JSON."""

    hash: str = ""
    body: bytes = b""
    is_strict: bool = False
    length: int = 0
    depth: int = 0


_NO_TOOLS = ToolList()


def _tools_in(fields: Mapping[str, Raw]) -> ToolList:
    """Return the tool list; lists of ordinary size are cached."""
    raw = bytes(fields.get("tools", b""))
    if not raw:
        return _NO_TOOLS
    return _tools(raw) if len(raw) <= _MAX_CACHED_TOOLS else _tools.__wrapped__(raw)


@lru_cache(maxsize=64)
def _tools(raw: bytes) -> ToolList:
    """Return a tool list; agents send the same one with every call."""
    if (depth := json_depth.depth(json_depth.strip_strings(raw))) > _DEEPEST:
        raise RecursionError(f"the tools have {depth} levels of JSON")
    tools = msgspec.json.decode(raw)
    count, is_strict = (len(tools), any(map(_is_strict, tools))) if isinstance(tools, list) else (0, False)
    return ToolList(*canon.tools_hash(tools), is_strict, count, depth)


def _is_strict(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and lax_values.lax_bool(function.get("strict")) is True


def trajectory_in(fields: Mapping[str, Raw]) -> str | None:
    """Return the trajectory id in the body's metadata."""
    return _metadata_in(fields, "trajectory_id")


def user_in(fields: Mapping[str, Raw]) -> str | None:
    """Return the end user that the body names: `user`, else `metadata.user_id`."""
    user = value(fields, "user")
    return user if isinstance(user, str) and user else _metadata_in(fields, "user_id")


def _metadata_in(fields: Mapping[str, Raw], name: str) -> str | None:
    metadata = value(fields, "metadata")
    found = metadata.get(name) if isinstance(metadata, dict) else None
    return found if isinstance(found, str) and found else None


def untrainable_by(fields: Mapping[str, Raw]) -> str | None:
    """Return why the completion's tokens cannot be trained, as far as the fields besides the messages show."""
    if is_true(fields, "echo"):
        return "echo"
    if is_true(fields, "use_beam_search"):
        return "beam_search"
    return None
