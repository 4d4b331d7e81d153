"""Captures what vLLM sampled from its responses, and removes the fields that the client did not request.

Promises: ids and logprobs are the engine's own, in order; nothing is padded, re-tokenized or invented. If they are
missing or inconsistent, the reason is recorded and no token of that choice. All other fields reach the client byte for
byte. Pure; no I/O.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Raw

from ratchet.proxy.errors import UpstreamDisconnected
from ratchet.store.content import json_depth
from ratchet.store.records import pack_ids, pack_logprobs

_PIECE = 64 * 1024  # bytes of ids that are decoded at once
_MAX_DEPTH = 100  # levels of JSON in a message: what a parser takes differs between versions of Python

_OTHER_TEXTS = ("reasoning", "reasoning_content", "refusal")  # vLLM's name of reasoning, and that of other servers


class _Logprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class _Usage(msgspec.Struct):
    prompt_tokens: _Count = 0
    completion_tokens: _Count = 0


_top = msgspec.json.Decoder(dict[str, Raw])
_choices = msgspec.json.Decoder(list[dict[str, Raw]])
_ids = msgspec.json.Decoder(list[_Count] | None)
_logprobs = msgspec.json.Decoder(_Logprobs | None)
_usage = msgspec.json.Decoder(_Usage | None)
_object = msgspec.json.Decoder(dict[str, Any])
_text = msgspec.json.Decoder(str | None)
_index = msgspec.json.Decoder(_Count)
_encode = msgspec.json.Encoder().encode

_NO_STATUS = 502  # of an error event that states none
_NULL = Raw(b"null")
_IDLE_DELTAS = (b"{}", b'{"content":null}')


def _checked_text(value: Any) -> str:
    """Return a string unchanged. Raises TypeError for anything else."""
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:40]!r} is not a string")
    return value


def _read_usage(raw: Raw) -> _Usage | None:
    """Return a response's usage; None if it is invalid (the client gets it unchanged)."""
    try:
        usage: _Usage | None = _usage.decode(raw)
        return usage
    except (msgspec.DecodeError, ValueError):
        return None


def _packed_ids(raw: bytes) -> bytes:
    """Return a JSON list of ids as packed bytes, decoded in pieces: each decoding holds the interpreter's lock.

    Raises msgspec.DecodeError.
    """
    if len(raw) <= _PIECE or not raw.startswith(b"["):
        return pack_ids(_ids.decode(raw) or ())
    packed, at, end = [], 1, len(raw) - 1
    while at < end:
        comma = raw.find(b",", at + _PIECE, end)
        until = end if comma < 0 else comma
        packed.append(pack_ids(_ids.decode(b"[" + raw[at:until] + b"]") or ()))
        at = until + 1
    return b"".join(packed)


class SampledChoice:
    """One choice of a response, while it arrives."""

    __slots__ = ("_content", "_message", "_other_texts", "_tools", "finish_reason", "ids", "index", "logprobs")

    def __init__(self, index: int) -> None:
        self.index = index
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: str | None = None
        self._content: list[str] = []
        self._other_texts: dict[str, list[str]] = {}
        self._tools: dict[int, dict[str, Any]] = {}
        self._message: dict[str, Any] | None = None

    def set_message(self, message: dict[str, Any]) -> None:
        """Set the message of a response that is not streamed."""
        self._message = message

    def add_delta(self, delta: dict[str, Any]) -> None:
        """Add a streamed delta."""
        if content := delta.get("content"):
            self._content.append(_checked_text(content))
        for name in _OTHER_TEXTS:
            if text := delta.get(name):
                self._other_texts.setdefault(name, []).append(_checked_text(text))
        for part in delta.get("tool_calls") or ():
            place = part.get("index", 0)
            if not isinstance(place, int):
                raise TypeError(f"a tool call has the place {str(place)[:40]!r}")
            call = self._tools.setdefault(
                place, {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
            )
            function = part.get("function") or {}
            call["id"] = _checked_text(part.get("id") or "") or call["id"]
            call["function"]["name"] += function.get("name") or ""
            call["function"]["arguments"] += function.get("arguments") or ""

    def message(self) -> dict[str, Any]:
        """Return the assistant message as the client has it by now."""
        if self._message is not None:
            return self._message
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._content) or None}
        for name, texts in self._other_texts.items():
            message[name] = "".join(texts)
        if self._tools:
            message["tool_calls"] = [self._tools[index] for index in sorted(self._tools)]
        return message

    def has_content(self) -> bool:
        """Return whether the client got any content of this choice."""
        return bool(self._message or self._content or self._tools or self._other_texts)

    def defect(self) -> str | None:
        """Return why these tokens cannot be trained, or None."""
        if not self.ids:
            return "no_token_ids"
        if not self.logprobs:
            return "no_logprobs"
        if len(self.ids) != len(self.logprobs):
            return f"{len(self.ids)} token ids but {len(self.logprobs)} logprobs"
        return None

    def packed(self) -> tuple[bytes, bytes]:
        """Return (ids, logprobs) as packed bytes; both empty if there is a defect."""
        return (b"", b"") if self.defect() else (pack_ids(self.ids), pack_logprobs(self.logprobs))


class Capture:
    """The captured response of one call. `asks_*`: fields that the client gets; `model`: the name that it gets."""

    def __init__(self, model: str, *, asks_ids: bool, asks_logprobs: bool, asks_usage: bool) -> None:
        self._model = Raw(_encode(model))
        self._asks_ids = asks_ids
        self._asks_logprobs = asks_logprobs
        self._asks_usage = asks_usage
        self._choices: dict[int, SampledChoice] = {}
        self.prompt_ids: bytes = b""
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.response_id: str | None = None  # the engine's id of this response
        self.error: str | None = None  # the message of an error event in the stream
        self.error_status = _NO_STATUS  # that the event states
        self.unread: str | None = None  # why the stream could not be read completely

    @property
    def choices(self) -> list[SampledChoice]:
        """The choices so far, by index."""
        return [self._choices[index] for index in sorted(self._choices)]

    def tokens(self) -> int:
        """Return the tokens of the call so far, prompt and completions."""
        return self.prompt_tokens + self.answer_tokens()

    def answer_tokens(self) -> int:
        """Return the tokens sampled so far."""
        return sum(len(choice.ids) for choice in self._choices.values()) or self.completion_tokens

    def untrainable(self) -> str | None:
        """Return why no token of this call can be trained, or None."""
        if self.unread:
            return self.unread
        if not self.prompt_ids:
            return "no_prompt_token_ids"
        if not self._choices:
            return "no_answer"
        return next((defect for choice in self.choices if (defect := choice.defect())), None)

    def whole(self, body: bytes) -> bytes:
        """Capture a response that is not streamed; return the client's body. Raises UpstreamDisconnected."""
        try:
            top = _top.decode(body)
            self._capture_head(top)
            choices = _choices.decode(top["choices"])
            for fields in choices:
                self._capture_choice(fields).set_message(self._message(fields))
            if sorted(self._choices) != list(range(len(choices))):
                raise ValueError(f"its {len(choices)} choices are numbered {sorted(self._choices)}")
            top["choices"] = Raw(_encode(choices))
        except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise UpstreamDisconnected(f"the upstream's response is not a chat completion: {error}") from error
        return _encode(top)

    def check_numbering(self) -> None:
        """Raise UpstreamDisconnected if a choice of a complete stream is missing."""
        if sorted(self._choices) != list(range(len(self._choices))):
            numbers = sorted(self._choices)[:10]
            raise UpstreamDisconnected(f"the upstream's stream lacks a choice: its choices are numbered {numbers}")

    def _capture_error(self, error: Any) -> None:
        """Capture what an error event of the stream states."""
        self.error = str(error)
        if isinstance(error, dict):
            self.error = str(error.get("message") or error)
            code = error.get("code")
            self.error_status = code if isinstance(code, int) and 400 <= code < 600 else _NO_STATUS

    def chunk(self, data: bytes) -> bytes | None:
        """Capture one streamed chunk; return the client's chunk, or None if nothing is left for it."""
        try:
            top = _top.decode(data)
            if "error" in top:
                self._capture_error(_object.decode(data)["error"])
                return data
            self._capture_head(top)
            choices = _choices.decode(top["choices"])
            idle = bool(choices)
            for fields in choices:
                if self._add_choice(self._capture_choice(fields), fields):
                    idle = False
        except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError, RecursionError):
            self.unread = "a chunk could not be read"
            return data
        if not self._asks_usage and "usage" in top:
            usage = top.pop("usage")
            if not choices and bytes(usage) != b"null":
                return None  # the extra chunk that only the proxy requested
        if idle and "usage" not in top and not (self._asks_ids or self._asks_logprobs):
            return None  # sent only for its ids
        top["choices"] = Raw(_encode(choices))
        return _encode(top)

    def _message(self, fields: dict[str, Raw]) -> dict[str, Any]:
        """Return the message of a choice. Raises ValueError, TypeError, AttributeError for an invalid one."""
        raw = fields["message"]
        if json_depth.depth_bound(bytes(raw), _MAX_DEPTH) > _MAX_DEPTH:
            raise ValueError(f"a message has more than {_MAX_DEPTH} levels of JSON")
        message = {k: v for k, v in _object.decode(raw).items() if v is not None}
        if not isinstance(message.get("content", ""), (str, list)):
            raise TypeError("the content of its message is neither text nor parts")
        for call in message.get("tool_calls", ()):
            _checked_text(call.get("id") or "")
        return message

    def _add_choice(self, choice: SampledChoice, fields: dict[str, Raw]) -> bool:
        """Add a streamed choice; return whether it has content for the client."""
        delta = fields["delta"]
        if bytes(delta) in _IDLE_DELTAS:
            return choice.finish_reason is not None
        choice.add_delta(_object.decode(delta))
        return True

    def _sampled(self, logprobs: Raw) -> list[float]:
        """Return the logprobs of the sampled tokens."""
        decoded = _logprobs.decode(logprobs)
        return [token.logprob for token in decoded.content] if decoded and decoded.content else []

    def _capture_head(self, top: dict[str, Raw]) -> None:
        if "model" in top:
            top["model"] = self._model
        if self.response_id is None and "id" in top:
            self.response_id = _text.decode(top["id"])
        if "prompt_token_ids" in top:
            self._capture_prompt(top)
        if "usage" in top and (usage := _read_usage(top["usage"])):
            self.prompt_tokens = usage.prompt_tokens
            self.completion_tokens = usage.completion_tokens

    def _capture_prompt(self, fields: dict[str, Raw]) -> None:
        raw = fields["prompt_token_ids"] if self._asks_ids else fields.pop("prompt_token_ids")
        if not self.prompt_ids and (ids := _packed_ids(bytes(raw))):
            self.prompt_ids = ids
            self.prompt_tokens = len(ids) // 4

    def _capture_choice(self, fields: dict[str, Raw]) -> SampledChoice:
        """Capture the tokens of one choice; remove the fields that the client did not request."""
        index = _index.decode(fields["index"])
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = SampledChoice(index)
        if "token_ids" in fields:
            raw = fields["token_ids"] if self._asks_ids else fields.pop("token_ids")
            choice.ids += _ids.decode(raw) or ()
        if "logprobs" in fields:
            choice.logprobs += self._sampled(fields["logprobs"])
            if not self._asks_logprobs:
                fields["logprobs"] = _NULL
        if "finish_reason" in fields:
            choice.finish_reason = _text.decode(fields["finish_reason"]) or choice.finish_reason
        return choice
