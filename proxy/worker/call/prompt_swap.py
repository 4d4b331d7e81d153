"""A chat request as it goes to vLLM with another system prompt. Pure.

Promises: every message but the system prompt goes on byte for byte, and the request that was given stays as it is:
linking and the records go by what the client said.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw

from ratchet.proxy.wire.request_body import ChatRequest
from ratchet.store.content.prompt_substitution import beginning, has_system_prompt
from ratchet.store.records.tuning import Prompt

_raws = msgspec.json.Decoder(list[Raw])
_encode = msgspec.json.Encoder().encode


def swapped(request: ChatRequest, prompt: Prompt, family: str) -> ChatRequest:
    """Return the request with a prompt swapped in; itself where the prompt has no text for the task family."""
    text = prompt.text_for(family)
    if not text:
        return request
    said = beginning(request.messages, prompt.mode, text)
    taken = has_system_prompt(request.messages)
    raws = [Raw(_encode(said)), *_raws.decode(request.fields["messages"])[taken:]]
    fields = {**request.fields, "messages": Raw(_encode(raws))}
    return msgspec.structs.replace(request, fields=fields, messages=[said, *request.messages[taken:]])
