"""Reads what vLLM really sampled out of its answers, and takes out of them what the client did not ask for.

Promises: ids and logprobs are the engine's own, in order; nothing is padded, re-tokenized or invented; where they
are missing or do not fit each other, the reason is kept and no token of that choice is. Every other field reaches
the client byte for byte. Pure; no I/O.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Raw

from ratchet.proxy.errors import UpstreamDisconnected
from ratchet.store.records import pack_ids, pack_logprobs

_REASONING = ("reasoning", "reasoning_content")  # vLLM's name, and the one that others use


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
_number = msgspec.json.Decoder(int)
_encode = msgspec.json.Encoder().encode

_NULL = Raw(b"null")
_IDLE_DELTAS = (b"{}", b'{"content":null}')


def _words(value: Any) -> str:
    """Return a text as it is. Raises TypeError for anything else."""
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:40]!r} stands where a text should")
    return value


def _read_usage(raw: Raw) -> _Usage | None:
    """Return what an answer says that it took; None where that is no count: it is told to the client as it is."""
    try:
        usage: _Usage | None = _usage.decode(raw)
        return usage
    except (msgspec.DecodeError, ValueError):
        return None


class SampledChoice:
    """One choice, as it grows."""

    __slots__ = ("_content", "_message", "_reasoning", "_tools", "finish_reason", "ids", "index", "logprobs")

    def __init__(self, index: int) -> None:
        self.index = index
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: str | None = None
        self._content: list[str] = []
        self._reasoning: dict[str, list[str]] = {}
        self._tools: dict[int, dict[str, Any]] = {}
        self._message: dict[str, Any] | None = None

    def whole(self, message: dict[str, Any]) -> None:
        """Take the message of an answer that did not stream."""
        self._message = message

    def grow(self, delta: dict[str, Any]) -> None:
        """Add a streamed delta."""
        if content := delta.get("content"):
            self._content.append(_words(content))
        for name in _REASONING:
            if thought := delta.get(name):
                _words(thought)
                self._reasoning.setdefault(name, []).append(thought)
        for part in delta.get("tool_calls") or ():
            place = part.get("index", 0)
            if not isinstance(place, int):
                raise TypeError(f"a tool call has the place {str(place)[:40]!r}")
            call = self._tools.setdefault(
                place, {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
            )
            function = part.get("function") or {}
            call["id"] = _words(part.get("id") or "") or call["id"]
            call["function"]["name"] += function.get("name") or ""
            call["function"]["arguments"] += function.get("arguments") or ""

    def message(self) -> dict[str, Any]:
        """Return the assistant message as a client that follows the protocol now has it."""
        if self._message is not None:
            return self._message
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._content) or None}
        for name, thoughts in self._reasoning.items():
            message[name] = "".join(thoughts)
        if self._tools:
            message["tool_calls"] = [self._tools[index] for index in sorted(self._tools)]
        return message

    def has_content(self) -> bool:
        """Return whether the client saw anything of this choice."""
        return bool(self._message or self._content or self._tools or self._reasoning)

    def defect(self) -> str | None:
        """Return why these tokens cannot be trusted, or None."""
        if not self.ids:
            return "no_token_ids"
        if not self.logprobs:
            return "no_logprobs"
        if len(self.ids) != len(self.logprobs):
            return f"{len(self.ids)} token ids but {len(self.logprobs)} logprobs"
        return None

    def packed(self) -> tuple[bytes, bytes]:
        """Return (ids, logprobs) as packed bytes; both empty where there is a defect."""
        return (b"", b"") if self.defect() else (pack_ids(self.ids), pack_logprobs(self.logprobs))


class Capture:
    """What one call's answer says. `asks_*`: what the client gets to see; `model`: the name it is told."""

    def __init__(self, model: str, *, asks_ids: bool, asks_logprobs: bool, asks_usage: bool) -> None:
        self._model = Raw(_encode(model))
        self._asks_ids = asks_ids
        self._asks_logprobs = asks_logprobs
        self._asks_usage = asks_usage
        self._choices: dict[int, SampledChoice] = {}
        self.prompt_ids: bytes = b""
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.response_id: str | None = None  # what the engine calls this answer
        self.error: str | None = None  # an error event inside the stream
        self.unread: str | None = None  # what of the stream could not be read

    @property
    def choices(self) -> list[SampledChoice]:
        """The choices so far, by index."""
        return [self._choices[index] for index in sorted(self._choices)]

    def tokens(self) -> int:
        """Return how many tokens the call has taken so far, prompt and answers."""
        return self.prompt_tokens + self.answer_tokens()

    def answer_tokens(self) -> int:
        """Return how many tokens were sampled so far."""
        return sum(len(choice.ids) for choice in self._choices.values()) or self.completion_tokens

    def untrainable(self) -> str | None:
        """Return why no token of this call may carry loss, or None."""
        if self.unread:
            return self.unread
        if not self.prompt_ids:
            return "no_prompt_token_ids"
        if not self._choices:
            return "no_answer"
        return next((defect for choice in self.choices if (defect := choice.defect())), None)

    def whole(self, body: bytes) -> bytes:
        """Read an answer that did not stream; return the client's form. Raises UpstreamDisconnected."""
        try:
            top = _top.decode(body)
            self._head(top)
            choices = _choices.decode(top["choices"])
            for fields in choices:
                self._choice(fields).whole(self._message(fields))
            top["choices"] = Raw(_encode(choices))
        except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise UpstreamDisconnected(f"the upstream's answer is not a chat completion: {error}") from error
        return _encode(top)

    def chunk(self, data: bytes) -> bytes | None:
        """Read one streamed chunk; return the client's form, or None where nothing is left for the client."""
        try:
            top = _top.decode(data)
            if "error" in top:
                told = _object.decode(data)["error"]
                self.error = str(told.get("message") or told) if isinstance(told, dict) else str(told)
                return data
            self._head(top)
            choices = _choices.decode(top["choices"])
            idle = bool(choices)
            for fields in choices:
                if self._grow(self._choice(fields), fields):
                    idle = False
        except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError, RecursionError):
            self.unread = "a chunk could not be read"
            return data
        if not self._asks_usage and "usage" in top:
            usage = top.pop("usage")
            if not choices and bytes(usage) != b"null":
                return None  # the extra chunk that we asked for
        if idle and "usage" not in top and not (self._asks_ids or self._asks_logprobs):
            return None  # vLLM sends it for the ids alone
        top["choices"] = Raw(_encode(choices))
        return _encode(top)

    def _message(self, fields: dict[str, Raw]) -> dict[str, Any]:
        """Return the message of a whole choice. Raises TypeError, AttributeError where it is none."""
        message = {k: v for k, v in _object.decode(fields["message"]).items() if v is not None}
        if not isinstance(message.get("content", ""), (str, list)):
            raise TypeError("the content of its message is neither text nor parts")
        for call in message.get("tool_calls", ()):
            _words(call.get("id") or "")
        return message

    def _grow(self, choice: SampledChoice, fields: dict[str, Raw]) -> bool:
        """Add what a streamed choice says; return whether there is anything in it for the client."""
        delta = fields["delta"]
        if bytes(delta) in _IDLE_DELTAS:
            return choice.finish_reason is not None
        choice.grow(_object.decode(delta))
        return True

    def _sampled(self, logprobs: Raw) -> list[float]:
        """Return the logprobs of the sampled tokens."""
        found = _logprobs.decode(logprobs)
        return [token.logprob for token in found.content] if found and found.content else []

    def _head(self, top: dict[str, Raw]) -> None:
        if "model" in top:
            top["model"] = self._model
        if self.response_id is None and "id" in top:
            self.response_id = _text.decode(top["id"])
        if "prompt_token_ids" in top:
            self._prompt(top)
        if "usage" in top and (usage := _read_usage(top["usage"])):
            self.prompt_tokens = usage.prompt_tokens
            self.completion_tokens = usage.completion_tokens

    def _prompt(self, fields: dict[str, Raw]) -> None:
        raw = fields["prompt_token_ids"] if self._asks_ids else fields.pop("prompt_token_ids")
        if not self.prompt_ids and (ids := _ids.decode(raw)):
            self.prompt_ids = pack_ids(ids)
            self.prompt_tokens = len(ids)

    def _choice(self, fields: dict[str, Raw]) -> SampledChoice:
        """Take the tokens out of one choice's fields; hide from the client what it did not ask for."""
        index = _number.decode(fields["index"])
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
