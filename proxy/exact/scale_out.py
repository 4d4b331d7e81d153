"""vLLM's token-in-token-out endpoints (`--enable-scale-out`): render, generate, derender, detokenize.

One function per endpoint. A missing endpoint is a `ScaleOutError` with the code NOT_OFFERED, any other refusal one
without; the client sees neither. Generate is a call like any other that may take minutes: only its body is built here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import Raw

from ratchet.proxy.errors import UpstreamDisconnected, UpstreamError
from ratchet.proxy.wire.upstream_response import UpstreamResponse

RENDER = "/v1/chat/completions/render"
GENERATE = "/inference/v1/generate"
DERENDER = "/v1/chat/completions/derender"
DETOKENIZE = "/detokenize"

_TIMEOUT = 20.0  # seconds of a call that does not generate
_STUB = Raw(b'[{"role":"user","content":"x"}]')  # derender ignores the messages of a request
_TRUE = Raw(b"true")

Fields = Mapping[str, Raw]  # a chat request's first level
_T = TypeVar("_T")

_fields = msgspec.json.Decoder(dict[str, Raw])
_encode = msgspec.json.Encoder().encode


NOT_OFFERED = "exact_not_offered"  # code of the error of a replica that was started without these endpoints


class ScaleOutError(UpstreamError):
    """The replica refused a request or returned an invalid response."""

    code = "exact_refused"


class Sender(Protocol):
    """Sends JSON bodies to replicas."""

    async def post_json(
        self, url: str, path: str, body: bytes, headers: Mapping[str, str] | None = None, /
    ) -> UpstreamResponse:
        """Send a JSON body by POST. Raises UpstreamError. Close the response."""


class Rendered(msgspec.Struct):
    """A rendered request: its prompt ids, and all members, which are passed to generate."""

    ids: list[int]
    members: dict[str, Raw]


class GeneratedChoice(msgspec.Struct):
    """A choice of generate's response, or a piece of one."""

    index: int
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: Raw = Raw(b"null")


class Generated(msgspec.Struct):
    """Generate's response, or one event of its stream."""

    choices: list[GeneratedChoice] = []
    usage: Raw = Raw(b"null")
    prompt_token_ids: list[int] | None = None
    error: Raw = Raw()


class DerenderedChunk(msgspec.Struct):
    """One derendered piece of a stream, and the state for the next piece."""

    chunk: dict[str, Any]
    stream_state: Raw


class _Text(msgspec.Struct):
    prompt: str


_ids = msgspec.json.Decoder(list[int])
generated_decoder = msgspec.json.Decoder(Generated)
_chunk = msgspec.json.Decoder(DerenderedChunk)
_text = msgspec.json.Decoder(_Text)
_object = msgspec.json.Decoder(dict[str, Any])


class ScaleOut:
    """The endpoints of the replicas that `sender` reaches."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender

    async def render(self, url: str, body: Fields) -> Rendered:
        """Return a chat request as ids and sampling parameters. Raises UpstreamError."""
        whole = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
        response = await self._ask(url, RENDER, _encode(whole))
        members = _read(_fields, response, RENDER)
        try:
            return Rendered(_ids.decode(members["token_ids"]), members)
        except (KeyError, msgspec.DecodeError) as error:
            raise ScaleOutError(f"{RENDER} answered without token_ids: {error}") from error

    async def text(self, url: str, model: str, ids: Sequence[int]) -> str:
        """Return the text of ids, including special tokens. Raises UpstreamError."""
        response = await self._ask(url, DETOKENIZE, _encode({"model": model, "tokens": ids}))
        return _read(_text, response, DETOKENIZE).prompt

    async def message(self, url: str, body: bytes) -> dict[str, Any]:
        """Return a derendered response, for a body of `whole_body`. Raises UpstreamError."""
        return _read(_object, await self._ask(url, DERENDER, body), DERENDER)

    async def delta(self, url: str, body: bytes) -> DerenderedChunk:
        """Return the next derendered piece of a stream, for a body of `piece_body`. Raises UpstreamError."""
        return _read(_chunk, await self._ask(url, DERENDER, body), DERENDER)

    async def _ask(self, url: str, path: str, body: bytes) -> bytes:
        try:
            async with asyncio.timeout(_TIMEOUT):
                response = await self._sender.post_json(url, path, body)
                try:
                    result = await response.read()
                finally:
                    response.close()
        except TimeoutError as error:
            raise ScaleOutError(f"took more than {_TIMEOUT:.0f} s for {path}", url=url) from error
        if response.status == 200:
            return result
        if response.status == 404 and b'"error"' not in result:  # vLLM's own 404, for a model, has an error object
            raise ScaleOutError(f"has no {path}", url=url, code=NOT_OFFERED)
        reason = result[:300].decode("utf-8", "replace")
        raise ScaleOutError(f"answered {path} with {response.status}", url=url, detail=reason)


def generate_body(rendered: Rendered, ids: Sequence[int], fields: Fields, *, streamed: bool, in_text: bool) -> bytes:
    """Return the body that generates after `ids` instead of the rendered ones.

    `in_text`: logprobs contain token texts. Without a client's limit, vLLM computes it for the longer prompt.
    """
    body: dict[str, Any] = {**rendered.members, "token_ids": ids, "return_token_ids": _TRUE}
    if not any(name in fields and bytes(fields[name]) != b"null" for name in ("max_tokens", "max_completion_tokens")):
        sampling = _fields.decode(rendered.members["sampling_params"])
        sampling.pop("max_tokens", None)
        body["sampling_params"] = sampling
    if streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if in_text:
        body["output_mode"] = "text"
    return _encode(body)


def request_for_derender(body: Fields) -> Raw:
    """Return the chat request for derender."""
    return Raw(_encode({**body, "messages": _STUB}))


def whole_body(model: str, request: Raw, prompt: Raw, choices: Sequence[GeneratedChoice]) -> bytes:
    """Return the body that derenders complete choices. `prompt`: the rendered ids, for the parser's first state."""
    result = [
        {"index": c.index, "token_ids": c.token_ids, "finish_reason": c.finish_reason, "stop_reason": c.stop_reason}
        for c in choices
    ]
    response = {"choices": result, "prompt_token_ids": prompt}
    return _encode({"model": model, "generate_response": response, "chat_request": request, "prompt_token_ids": prompt})


def piece_body(model: str, request: Raw, prompt: Raw, piece: GeneratedChoice, state: Raw | None) -> bytes:
    """Return the body that derenders the next piece of a stream."""
    result = {
        "index": piece.index,
        "token_ids": piece.token_ids,
        "finish_reason": piece.finish_reason,
        "stop_reason": piece.stop_reason,
    }
    return _encode(
        {
            "stream": True,
            "model": model,
            "generate_chunk": {"choices": [result]},
            "stream_state": state,
            "chat_request": request,
            "prompt_token_ids": prompt,
        }
    )


def read_generated(body: bytes) -> Generated:
    """Return generate's response. Raises UpstreamError."""
    result = _read(generated_decoder, body, GENERATE)
    if bytes(result.error):
        raise ScaleOutError(f"{GENERATE} answered {bytes(result.error)[:300].decode('utf-8', 'replace')}")
    return result


def _read(decoder: msgspec.json.Decoder[_T], body: bytes, path: str) -> _T:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise UpstreamDisconnected(f"the response of {path} is invalid: {error}") from error
