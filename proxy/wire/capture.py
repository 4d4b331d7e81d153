"""Captures what an engine sampled from its responses, and clears the fields that the client did not request.

Promises: ids and logprobs are the engine's own, in order; nothing is padded, re-tokenized or invented. If they are
missing or inconsistent, the reason is recorded and no token of that choice. All other fields reach the client byte for
byte; those that it did not request are null, as vLLM sends them, also if their values cannot be read. Pure; no I/O.

`Capture.cut` says whether an answer is whole: by finish reasons, error event, numbers of choices and end of the stream.
vLLM is read strictly. Other servers are read leniently: they leave out what vLLM always sends.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Raw

from ratchet.proxy.errors import UpstreamDisconnected, UpstreamError, upstream_refusal
from ratchet.proxy.wire.tool_calls import ToolCalls
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
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None


_top = msgspec.json.Decoder(dict[str, Raw])
_choices = msgspec.json.Decoder(list[dict[str, Raw]])
_ids = msgspec.json.Decoder(list[_Count] | None)
_logprobs = msgspec.json.Decoder(_Logprobs | None)
_usage = msgspec.json.Decoder(_Usage | None)
_object = msgspec.json.Decoder(dict[str, Any])
_text = msgspec.json.Decoder(str | None)
_index = msgspec.json.Decoder(_Count)
_encode = msgspec.json.Encoder().encode

_NO_STATUS = 502  # of an error that states none
_NULL = Raw(b"null")
_IDLE_DELTAS = (b"{}", b'{"content":null}')
_IDS = ("token_ids", "prompt_token_ids")
_CUT = ("abort", "error")  # finish reasons of an answer that the engine did not complete
_ROUNDING = 1e-3  # logprobs may be above 0 by this much
_LEAST = -3e38  # of what float32 can hold
_UNREADABLE = (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError, RecursionError)


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

    __slots__ = (
        *("_content", "_message", "_other_texts", "_tools", "finish_reason", "ids", "index", "logprobs"),
        "has_invalid_logprobs",
    )

    def __init__(self, index: int) -> None:
        self.index = index
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.has_invalid_logprobs = False  # one is not a number
        self.finish_reason: str | None = None
        self._content: list[str] = []
        self._other_texts: dict[str, list[str]] = {}
        self._tools = ToolCalls()
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
            self._tools.add(part)

    def message(self) -> dict[str, Any]:
        """Return the assistant message as the client has it by now."""
        if self._message is not None:
            return self._message
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._content) or None}
        for name, texts in self._other_texts.items():
            message[name] = "".join(texts)
        if self._tools:
            message["tool_calls"] = self._tools.as_message()
        return message

    def has_content(self) -> bool:
        """Return whether the client got any content of this choice."""
        return bool(self._message or self._content or self._tools or self._other_texts)

    def defect(self) -> str | None:
        """Return why these tokens cannot be trained, or None."""
        if not self.ids:
            return "no_token_ids"
        if self.has_invalid_logprobs:
            return "invalid_logprobs"
        if not self.logprobs:
            return "no_logprobs"
        if max(self.logprobs) > _ROUNDING or min(self.logprobs) < _LEAST:
            return "invalid_logprobs"
        if len(self.ids) != len(self.logprobs):
            return "length_mismatch"
        return None

    def packed(self) -> tuple[bytes, bytes]:
        """Return (ids, logprobs) as packed bytes; both empty if there is a defect."""
        return (b"", b"") if self.defect() else (pack_ids(self.ids), pack_logprobs(self.logprobs))


class Capture:
    """The captured response of one call.

    Args:
        model: the name that the client gets.
        asks_ids, asks_logprobs, asks_usage: which of these fields the client gets.
        lenient: the server is not vLLM. It may leave out choices, their indexes, deltas and finish reasons, may send
            `"error": null`, and may end a stream without [DONE] after the finish reasons.
    """

    _PIECE: ClassVar = ("delta", Raw(b"{}"))  # of a streamed choice: its field, and an empty one

    def __init__(
        self, model: str, *, asks_ids: bool, asks_logprobs: bool, asks_usage: bool, lenient: bool = False
    ) -> None:
        self._model = Raw(_encode(model))
        self._asks_ids = asks_ids
        self._asks_logprobs = asks_logprobs
        self._asks_usage = asks_usage
        self._lenient = lenient
        self._choices: dict[int, SampledChoice] = {}
        self._usage = _Usage()
        self.prompt_ids: bytes = b""
        self.response_id: str | None = None  # the engine's id of this response
        self.error: str | None = None  # the message of an error event in the stream
        self.error_status = _NO_STATUS  # that the event states
        self.unread: str | None = None  # why the stream could not be read completely
        self.is_done = False  # the stream had its [DONE], or the response was not streamed

    @property
    def choices(self) -> list[SampledChoice]:
        """The choices so far, by index."""
        return [self._choices[index] for index in sorted(self._choices)]

    def tokens(self) -> int:
        """Return the tokens of the call so far, prompt and completions."""
        return self.prompt_tokens + self.answer_tokens()

    @property
    def prompt_tokens(self) -> int:
        """The tokens of the prompt, as far as is known."""
        return max(len(self.prompt_ids) // 4, self._usage.prompt_tokens or 0)

    def answer_tokens(self) -> int:
        """Return the tokens sampled so far."""
        return max(self._sampled_ids(), self._usage.completion_tokens or 0)

    def _sampled_ids(self) -> int:
        return sum(len(choice.ids) for choice in self._choices.values())

    @property
    def has_started(self) -> bool:
        """Whether the engine has sampled anything."""
        return any(choice.ids or choice.has_content() for choice in self._choices.values())

    def untrainable(self) -> str | None:
        """Return why no token of this call can be trained, or None."""
        if self.unread:
            return self.unread
        if not self.prompt_ids:
            return "no_prompt_token_ids"
        if not self._choices:
            return "no_answer"
        if defect := next((defect for choice in self.choices if (defect := choice.defect())), None):
            return defect
        too_few = self._sampled_ids() < self.answer_tokens() or len(self.prompt_ids) // 4 < self.prompt_tokens
        return "length_mismatch" if too_few else None

    def cut(self) -> UpstreamError | None:
        """Return why the answer is not whole, by what the engine said of it; None if it is.

        Its message has the upstream as its subject, without a URL.
        """
        if self.error is not None:
            return upstream_refusal(self.error, self.error_status)
        if self.unread and not self._lenient:
            return UpstreamDisconnected(f"the upstream's answer is not as vLLM's: {self.unread}")
        numbers = sorted(self._choices)
        if numbers != list(range(len(numbers))):
            return UpstreamDisconnected(
                f"the upstream's stream lacks a choice: its choices are numbered {numbers[:10]}"
            )
        reasons = {choice.finish_reason or "" for choice in self._choices.values()}
        if stated := reasons.intersection(_CUT):
            return UpstreamDisconnected(f"the upstream did not complete its answer: finish_reason {min(stated)}")
        has_ended = bool(reasons) and "" not in reasons
        if not has_ended and not (self._lenient and self.is_done):
            return UpstreamDisconnected("the upstream ended its answer without a finish_reason")
        if not self.is_done and not self._lenient:
            return UpstreamDisconnected("the upstream ended its stream without [DONE]")
        return None

    def says_cut(self) -> bool:
        """Return whether the response itself says that it is not whole, by an error event or a finish reason."""
        return self.error is not None or any(choice.finish_reason in _CUT for choice in self._choices.values())

    def whole(self, body: bytes) -> bytes:
        """Capture a response that is not streamed; return the client's body. Raises UpstreamDisconnected."""
        try:
            top = _top.decode(body)
            if bytes(top.get("error", _NULL)) != b"null":
                raise ValueError("it is an error")
            self._capture_head(top)
            choices = _choices.decode(top["choices"])
            if self._lenient:
                _number(choices)
            for fields in choices:
                self._capture_choice(fields).set_message(self._message(fields))
            if sorted(self._choices) != list(range(len(choices))):
                raise ValueError(f"its {len(choices)} choices are numbered {sorted(self._choices)}")
        except _UNREADABLE as error:
            raise UpstreamDisconnected(f"the upstream's response is not a chat completion: {error}") from error
        self.is_done = True
        return self._for_client(top, choices)

    def _capture_error(self, error: Any) -> None:
        """Capture what an error event of the stream states."""
        self.error, self.error_status = read_error(error)

    def chunk(self, data: bytes) -> bytes | None:
        """Capture one streamed chunk; return the client's chunk, or None if nothing is left for it."""
        try:
            top = _top.decode(data)
            if self._lenient:
                _complete(top)
            if "error" in top:
                self._capture_error(_object.decode(data)["error"])
                return data
            choices = _choices.decode(top["choices"])
        except _UNREADABLE:
            self.unread = "a chunk could not be read"
            return data
        idle = self._capture_chunk(top, choices)
        if not self._asks_usage and "usage" in top:
            usage = top.pop("usage")
            if not choices and bytes(usage) != b"null":
                return None  # the extra chunk that only the proxy requested
        if idle and "usage" not in top and not (self._asks_ids or self._asks_logprobs):
            return None  # sent only for its ids
        return self._for_client(top, choices)

    def _capture_chunk(self, top: dict[str, Raw], choices: list[dict[str, Raw]]) -> bool:
        """Capture a chunk; return whether it has nothing for a client that did not ask for tokens."""
        idle = bool(choices)
        try:
            self._capture_head(top)
            if self._lenient:
                _number(choices)
                name, empty = self._PIECE
                for fields in choices:
                    if bytes(fields.get(name, _NULL)) == b"null":
                        fields[name] = empty
            for fields in choices:
                if self._add_choice(self._capture_choice(fields), fields):
                    idle = False
        except _UNREADABLE:
            self.unread = "a chunk could not be read"
            return False
        return idle

    def _for_client(self, top: dict[str, Raw], choices: list[dict[str, Raw]]) -> bytes:
        """Return a body or chunk with the model's name for the client, and null for what it did not request."""
        if "model" in top:
            top["model"] = self._model
        if not self._asks_ids:
            for fields in (top, *choices):
                for name in _IDS:
                    if name in fields:
                        fields[name] = _NULL
        if not self._asks_logprobs:
            for fields in choices:
                if "logprobs" in fields:
                    fields["logprobs"] = _NULL
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
        if self.response_id is None and "id" in top:
            self.response_id = _text.decode(top["id"])
        if "prompt_token_ids" in top:
            self._capture_prompt(top["prompt_token_ids"])
        if "usage" in top and (usage := _read_usage(top["usage"])):
            self._usage = usage

    def _capture_prompt(self, raw: Raw) -> None:
        if not self.prompt_ids:
            self.prompt_ids = _packed_ids(bytes(raw))

    def _capture_choice(self, fields: dict[str, Raw]) -> SampledChoice:
        """Capture the tokens of one choice."""
        index = _index.decode(fields["index"])
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = SampledChoice(index)
        if "token_ids" in fields:
            choice.ids += _ids.decode(fields["token_ids"]) or ()
        if "logprobs" in fields:
            try:
                choice.logprobs += self._sampled(fields["logprobs"])
            except msgspec.DecodeError:
                choice.has_invalid_logprobs = True
        if "finish_reason" in fields:
            choice.finish_reason = _text.decode(fields["finish_reason"]) or choice.finish_reason
        return choice


def _complete(top: dict[str, Raw]) -> None:
    """Give a chunk of a server that is not vLLM the choices that it left out, and remove an error that is null."""
    if bytes(top.get("error", b"")) == b"null":
        del top["error"]
    if bytes(top.get("choices", _NULL)) == b"null":
        top["choices"] = Raw(b"[]")


def _number(choices: list[dict[str, Raw]]) -> None:
    """Give choices without an index their place."""
    for place, fields in enumerate(choices):
        if bytes(fields.get("index", _NULL)) == b"null":
            fields["index"] = Raw(b"%d" % place)


def read_error(error: Any) -> tuple[str, int]:
    """Return the message of an error object, and the HTTP status that its code states, else 502."""
    if not isinstance(error, dict):
        return str(error), _NO_STATUS
    code = error.get("code")
    if isinstance(code, str) and code.isdecimal():
        code = int(code)
    status = code if isinstance(code, int) and 400 <= code < 600 else _NO_STATUS
    return str(error.get("message") or error), status


def error_in(body: bytes) -> int | None:
    """Return the HTTP status that an error object in place of an answer states; None if the body is none."""
    try:
        error = _object.decode(body).get("error")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return None if error is None else read_error(error)[1]
