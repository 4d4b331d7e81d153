"""A key's cap on the completion tokens of each answer. Pure.

As vLLM does with its own limits, a higher `max_tokens` is lowered, not refused: the answer then ends with the finish
reason `length`. A request that names no limit gets the cap, at most the model's context. The record shows what was
sampled with.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import Raw

from ratchet.proxy.dialects.dialect import ParsedRequest
from ratchet.proxy.wire import lax_values, request_body
from ratchet.proxy.wire.request_body import ChatRequest

_NAMES = ("max_completion_tokens", "max_tokens")
_COMPLETIONS_DEFAULT = 16  # vLLM's and OpenAI's, of a text completion without `max_tokens`


def cap_max_tokens(parsed: ParsedRequest, cap: int, context: int | None) -> ParsedRequest:
    """Return the request with at most `cap` tokens per answer; `context`: the model's length, if known."""
    changed = _changes(parsed.request, cap, context)
    if not changed:
        return parsed
    request, storable = parsed.request, parsed.storable
    fields = {**request.fields, **{name: Raw(b"%d" % limit) for name, limit in changed.items()}}
    capped = msgspec.structs.replace(request, fields=fields, sampling={**request.sampling, **changed})
    if storable is not None:
        storable = msgspec.structs.replace(storable, sampling={**storable.sampling, **changed})
    return msgspec.structs.replace(parsed, request=capped, storable=storable)


def _changes(request: ChatRequest, cap: int, context: int | None) -> Mapping[str, int]:
    """Return the fields to set. A value that is no number stays: the server refuses it."""
    given = {name: request_body.value(request.fields, name) for name in _NAMES if name in request.fields}
    named = {name: value for name, value in given.items() if value is not None}
    if named:
        return {name: cap for name, value in named.items() if (lax_values.lax_int(value) or 0) > cap}
    if context is not None:
        cap = min(cap, context)
    if request.is_chat:
        return {"max_completion_tokens": cap}
    if "max_tokens" not in given and cap >= _COMPLETIONS_DEFAULT:
        return {}
    return {"max_tokens": cap}
