"""Generated ids as the chat completion that vLLM itself would have answered, in one body.

The rest of the proxy cannot tell it from an answer of plain chat: same members, ids and logprobs in them. What is
missing is told in `docs/exact-context.md`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw

from ratchet.proxy.exact import derender_fixes
from ratchet.proxy.exact.scale_out import (
    Fields,
    GeneratedChoice,
    Rendered,
    ScaleOut,
    ScaleOutError,
    read_generated,
    request_for_derender,
    whole_body,
)
from ratchet.proxy.wire import lax_values
from ratchet.proxy.wire.request_body import ChatRequest, value
from ratchet.proxy.wire.upstream_response import UpstreamResponse

_encode = msgspec.json.Encoder().encode

Json = dict[str, Any]


@dataclass(slots=True, frozen=True)
class DerenderRequest:
    """What the answer is made for. `prompt` was sent; `rendered` is what plain chat would have sent, as JSON."""

    id: str
    model: str
    request: Raw  # for derender
    rendered: Raw
    prompt: Sequence[int]
    count: int  # choices
    tool_choice: Any
    stops: tuple[str, ...]
    bare_logprobs: bool  # the client asked for none of the likeliest others: plain chat then lists none

    @classmethod
    def of(
        cls, asked: ChatRequest, name: str, body: Fields, rendered: Rendered, prompt: Sequence[int]
    ) -> DerenderRequest:
        """Return what is made of a request whose `body` went to be rendered; `name` is the answer's id."""
        stop = value(body, "stop") or ()
        return cls(
            id=name,
            model=value(body, "model"),
            request=request_for_derender(body),
            rendered=Raw(_encode(rendered.ids)),
            prompt=prompt,
            count=lax_values.lax_int(value(body, "n")) or 1,
            tool_choice=value(body, "tool_choice"),
            stops=(stop,) if isinstance(stop, str) else tuple(stop),
            bare_logprobs=asked.asks_logprobs and not value(body, "top_logprobs"),
        )

    def head(self, kind: str) -> Json:
        """Return the members that every event or body begins with."""
        return {"id": self.id, "object": kind, "created": int(time.time()), "model": self.model}

    def logprobs(self, given: Raw) -> Any:
        """Return logprobs as plain chat lists them."""
        if not self.bare_logprobs or bytes(given) == b"null":
            return given
        told = msgspec.json.decode(given)
        for token in told["content"] or ():
            token["top_logprobs"] = []
        return told

    def check_prompt(self, ids: Sequence[int] | None) -> None:
        """Raise Refused where the engine did not read what was sent."""
        if ids != self.prompt:
            raise ScaleOutError("generate read other ids than it was sent")


class WholeResponse:
    """A chat completion that is all here."""

    status = 200
    headers: Mapping[str, str] = {}

    def __init__(self, url: str, body: bytes) -> None:
        self.url = url
        self._body = body

    async def read(self) -> bytes:
        """Return the body."""
        return self._body

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body."""
        yield self._body

    def close(self) -> None:
        """Nothing is held."""


async def read_whole_response(scale_out: ScaleOut, ids: UpstreamResponse, wanted: DerenderRequest) -> WholeResponse:
    """Return generate's answer in words. Raises UpstreamError."""
    told = read_generated(await ids.read())
    wanted.check_prompt(told.prompt_token_ids)
    cut = [derender_fixes.strip_turn_end(choice) for choice in told.choices]
    worded = await _worded(scale_out, ids.url, wanted, [choice for choice in cut if choice.token_ids])
    choices = []
    for choice in told.choices:
        message = derender_fixes.fix_message(worded.get(choice.index), choice)
        choices.append(
            {
                "index": choice.index,
                "message": message,
                "logprobs": wanted.logprobs(choice.logprobs),
                "finish_reason": derender_fixes.fix_finish_reason(choice, message, wanted.tool_choice),
                "stop_reason": choice.stop_reason,
                "token_ids": choice.token_ids,
            }
        )
    body = {
        **wanted.head("chat.completion"),
        "choices": choices,
        "service_tier": None,
        "usage": told.usage,
        "prompt_logprobs": None,
        "prompt_token_ids": told.prompt_token_ids,
        "kv_transfer_params": None,
    }
    return WholeResponse(ids.url, _encode(body))


async def _worded(
    scale_out: ScaleOut, url: str, wanted: DerenderRequest, choices: Sequence[GeneratedChoice]
) -> dict[int, Json]:
    """Return the messages of choices by index."""
    if not choices:
        return {}
    answer = await scale_out.message(url, whole_body(wanted.model, wanted.request, wanted.rendered, choices))
    try:
        return {choice["index"]: choice["message"] for choice in answer["choices"]}
    except (KeyError, TypeError) as error:
        raise ScaleOutError(f"derender's answer has no {error}") from error
