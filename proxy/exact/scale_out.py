"""vLLM's token-in-token-out endpoints (`--enable-scale-out`): render, generate, derender, detokenize.

Each is one function from our words to vLLM's and back; what an answer means is for others. An endpoint that is not
there is `EndpointNotOffered`, any other refusal is `ScaleOutError`; neither is ever the client's business. Generating
is not done here, as it is a call like any other that may take minutes: only its body is made.
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

_PATIENCE = 20.0  # seconds for a call that generates nothing
_STUB = Raw(b'[{"role":"user","content":"x"}]')  # derender reads everything of a request but its messages
_TRUE = Raw(b"true")

Fields = Mapping[str, Raw]  # a chat request's first level
_T = TypeVar("_T")

_fields = msgspec.json.Decoder(dict[str, Raw])
_encode = msgspec.json.Encoder().encode


class ScaleOutError(UpstreamError):
    """The replica answered, but not with what was asked for."""

    code = "exact_refused"


class EndpointNotOffered(ScaleOutError):
    """The replica was started without these endpoints."""

    code = "exact_not_offered"


class Sender(Protocol):
    """What sends a JSON body to a replica."""

    async def post_json(
        self, url: str, path: str, body: bytes, headers: Mapping[str, str] | None = None, /
    ) -> UpstreamResponse:
        """Send a JSON body by POST. Raises UpstreamError. Close the answer."""


class Rendered(msgspec.Struct):
    """A rendered request: its prompt's ids, and every member that goes on to generate as it is."""

    ids: list[int]
    members: dict[str, Raw]


class GeneratedChoice(msgspec.Struct):
    """What generate says of a choice, or of a piece of one."""

    index: int
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: Raw = Raw(b"null")


class Generated(msgspec.Struct):
    """Generate's answer, or one event of its stream."""

    choices: list[GeneratedChoice] = []
    usage: Raw = Raw(b"null")
    prompt_token_ids: list[int] | None = None
    error: Raw = Raw()


class DerenderedChunk(msgspec.Struct):
    """One piece of a stream in words, and the state that the next piece needs."""

    chunk: dict[str, Any]
    stream_state: Raw


class _Text(msgspec.Struct):
    prompt: str


_ids = msgspec.json.Decoder(list[int])
generated_decoder = msgspec.json.Decoder(Generated)
_worded = msgspec.json.Decoder(DerenderedChunk)
_text = msgspec.json.Decoder(_Text)
_object = msgspec.json.Decoder(dict[str, Any])


class ScaleOut:
    """The endpoints of the replicas that `sender` reaches."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender

    async def render(self, url: str, body: Fields) -> Rendered:
        """Return a chat request as ids and sampling parameters. Raises UpstreamError."""
        whole = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
        answer = await self._ask(url, RENDER, _encode(whole))
        members = _read(_fields, answer, RENDER)
        try:
            return Rendered(_ids.decode(members["token_ids"]), members)
        except (KeyError, msgspec.DecodeError) as error:
            raise ScaleOutError(f"{RENDER} answered without token_ids: {error}") from error

    async def text(self, url: str, model: str, ids: Sequence[int]) -> str:
        """Return the text of ids, special ones as they are spelled. Raises UpstreamError."""
        answer = await self._ask(url, DETOKENIZE, _encode({"model": model, "tokens": ids}))
        return _read(_text, answer, DETOKENIZE).prompt

    async def message(self, url: str, body: bytes) -> dict[str, Any]:
        """Return a whole answer in words, for a body of `whole_body`. Raises UpstreamError."""
        return _read(_object, await self._ask(url, DERENDER, body), DERENDER)

    async def delta(self, url: str, body: bytes) -> DerenderedChunk:
        """Return the next piece of a streamed answer, for a body of `piece_body`. Raises UpstreamError."""
        return _read(_worded, await self._ask(url, DERENDER, body), DERENDER)

    async def _ask(self, url: str, path: str, body: bytes) -> bytes:
        try:
            async with asyncio.timeout(_PATIENCE):
                answer = await self._sender.post_json(url, path, body)
                try:
                    told = await answer.read()
                finally:
                    answer.close()
        except TimeoutError as error:
            raise ScaleOutError(f"upstream {url}: {path} took more than {_PATIENCE:.0f} s") from error
        if answer.status == 200:
            return told
        if answer.status == 404 and b'"error"' not in told:  # vLLM's own 404, for a model, has an error object
            raise EndpointNotOffered(f"upstream {url} has no {path}")
        raise ScaleOutError(f"upstream {url}: {path} answered {answer.status} {told[:300].decode('utf-8', 'replace')}")


def generate_body(rendered: Rendered, ids: Sequence[int], fields: Fields, *, streamed: bool, in_text: bool) -> bytes:
    """Return the body that generates after `ids` in place of the rendered ones.

    `in_text`: logprobs name their tokens. Where the client set no limit, vLLM works it out for the longer prompt.
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
    """Return what derender has to know of a chat request."""
    return Raw(_encode({**body, "messages": _STUB}))


def whole_body(model: str, request: Raw, prompt: Raw, choices: Sequence[GeneratedChoice]) -> bytes:
    """Return the body that words whole choices. `prompt`: the rendered ids, for the parser's first state."""
    told = [
        {"index": c.index, "token_ids": c.token_ids, "finish_reason": c.finish_reason, "stop_reason": c.stop_reason}
        for c in choices
    ]
    answer = {"choices": told, "prompt_token_ids": prompt}
    return _encode({"model": model, "generate_response": answer, "chat_request": request, "prompt_token_ids": prompt})


def piece_body(model: str, request: Raw, prompt: Raw, piece: GeneratedChoice, state: Raw | None) -> bytes:
    """Return the body that words the next piece of a stream."""
    told = {
        "index": piece.index,
        "token_ids": piece.token_ids,
        "finish_reason": piece.finish_reason,
        "stop_reason": piece.stop_reason,
    }
    return _encode(
        {
            "stream": True,
            "model": model,
            "generate_chunk": {"choices": [told]},
            "stream_state": state,
            "chat_request": request,
            "prompt_token_ids": prompt,
        }
    )


def read_generated(body: bytes) -> Generated:
    """Return generate's answer. Raises UpstreamError."""
    told = _read(generated_decoder, body, GENERATE)
    if bytes(told.error):
        raise ScaleOutError(f"{GENERATE} answered {bytes(told.error)[:300].decode('utf-8', 'replace')}")
    return told


def _read(decoder: msgspec.json.Decoder[_T], body: bytes, path: str) -> _T:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise UpstreamDisconnected(f"the answer of {path} cannot be read: {error}") from error
