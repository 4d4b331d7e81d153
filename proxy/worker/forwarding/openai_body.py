"""The body of a captured call for a server that knows OpenAI's fields and no others. Pure.

What the client itself wrote in a chat or text completion passes as it is, as it would at that server. What the
translation of another dialect has added is left out where only vLLM understands it.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from ratchet.proxy.wire.request_body import ChatRequest

_VLLM_ONLY = (
    "chat_template_kwargs", "ignore_eos", "min_p", "min_tokens", "repetition_penalty", "stop_token_ids",
    "structured_outputs", "top_k",
)  # fmt: skip
_AS_WRITTEN = ("chat", "completions")  # the dialects that such a server speaks itself

_encode = msgspec.json.Encoder().encode
_messages = msgspec.json.Decoder(list[dict[str, Any]])


def openai_body(request: ChatRequest, served_name: str, dialect: str) -> bytes:
    """Return the body: the server's own name of the model, and usage where it streams, which is recorded."""
    fields = {**request.fields, "model": Raw(_encode(served_name))}
    fields.pop("return_token_ids", None)
    if dialect not in _AS_WRITTEN:
        for name in _VLLM_ONLY:
            fields.pop(name, None)
        messages = _messages.decode(fields["messages"])
        fields["messages"] = Raw(_encode([_without_thoughts(message) for message in messages]))
    if request.streamed:
        fields["stream_options"] = Raw(_encode({**request.stream_options, "include_usage": True}))
    return _encode(fields)


def _without_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != "reasoning"}
