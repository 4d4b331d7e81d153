"""Builds from generated ids the chat completion that vLLM's plain chat would have returned, in one body.

The response has the same members, with ids and logprobs. `docs/exact-context.md` lists the differences.
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
    """What derendering needs from the request. `prompt` was sent; `rendered` is what plain chat would send, as JSON."""

    id: str
    model: str
    request: Raw  # for derender
    rendered: Raw
    prompt: Sequence[int]
    count: int  # choices
    tool_choice: Any
    stops: tuple[str, ...]
    bare_logprobs: bool  # the client requested no top_logprobs: plain chat then returns empty lists

    @classmethod
    def of(
        cls, request: ChatRequest, name: str, body: Fields, rendered: Rendered, prompt: Sequence[int]
    ) -> DerenderRequest:
        """Return the derender request for a rendered `body`; `name` is the response's id."""
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
            bare_logprobs=request.asks_logprobs and not value(body, "top_logprobs"),
        )

    def head(self, kind: str) -> Json:
        """Return the first members of every event or body."""
        return {"id": self.id, "object": kind, "created": int(time.time()), "model": self.model}

    def logprobs(self, logprobs: Raw) -> Any:
        """Return logprobs as plain chat returns them."""
        if not self.bare_logprobs or bytes(logprobs) == b"null":
            return logprobs
        generated = msgspec.json.decode(logprobs)
        for token in generated["content"] or ():
            token["top_logprobs"] = []
        return generated

    def check_prompt(self, ids: Sequence[int] | None) -> None:
        """Raise ScaleOutError if the engine read other ids than were sent."""
        if ids != self.prompt:
            raise ScaleOutError("generate read other ids than were sent")


class WholeResponse:
    """A complete chat completion."""

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
        """Nothing to close."""


async def read_whole_response(scale_out: ScaleOut, ids: UpstreamResponse, derender: DerenderRequest) -> WholeResponse:
    """Return generate's response as a chat completion. Raises UpstreamError."""
    generated = read_generated(await ids.read())
    derender.check_prompt(generated.prompt_token_ids)
    cut = [derender_fixes.strip_turn_end(choice) for choice in generated.choices]
    messages = await _derender(scale_out, ids.url, derender, [choice for choice in cut if choice.token_ids])
    choices = []
    for choice in generated.choices:
        message = derender_fixes.fix_message(messages.get(choice.index), choice)
        choices.append(
            {
                "index": choice.index,
                "message": message,
                "logprobs": derender.logprobs(choice.logprobs),
                "finish_reason": derender_fixes.fix_finish_reason(choice, message, derender.tool_choice),
                "stop_reason": choice.stop_reason,
                "token_ids": choice.token_ids,
            }
        )
    body = {
        **derender.head("chat.completion"),
        "choices": choices,
        "service_tier": None,
        "usage": generated.usage,
        "prompt_logprobs": None,
        "prompt_token_ids": generated.prompt_token_ids,
        "kv_transfer_params": None,
    }
    return WholeResponse(ids.url, _encode(body))


async def _derender(
    scale_out: ScaleOut, url: str, derender: DerenderRequest, choices: Sequence[GeneratedChoice]
) -> dict[int, Json]:
    """Return the messages of choices by index."""
    if not choices:
        return {}
    answer = await scale_out.message(url, whole_body(derender.model, derender.request, derender.rendered, choices))
    try:
        return {choice["index"]: choice["message"] for choice in answer["choices"]}
    except (KeyError, TypeError) as error:
        raise ScaleOutError(f"derender's response has no {error}") from error
