"""Marks requests whose tool calls vLLM constrains with a grammar: the policy did not choose those tokens freely.

vLLM 0.32 constrains `tool_choice: auto` if a tool is `strict`, if `parallel_tool_calls` is false, and for all tools at
the server's levels `function` and `parameter`. At `off` (VLLM_ENFORCE_STRICT_TOOL_CALLING=0) it never does. Other
values of `tool_choice` force a call; the recorded sampling parameters show those. Pure.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ratchet.proxy.dialects.dialect import ParsedRequest
from ratchet.proxy.wire import lax_values
from ratchet.proxy.wire.request_body import ChatRequest
from ratchet.store.records import TOOL_GRAMMAR

Level = Literal["off", "auto", "function", "parameter"]  # vLLM's --tool-strict-level, and off


def mark_tool_grammar(parsed: ParsedRequest, level: Level) -> ParsedRequest:
    """Return a request with tools; its sampling parameters say so if a grammar constrains the calls."""
    if level == "off" or not _is_constrained(parsed.request, level):
        return parsed
    mark: dict[str, Any] = {TOOL_GRAMMAR: True}
    request = msgspec.structs.replace(parsed.request, sampling={**parsed.request.sampling, **mark})
    storable = parsed.storable
    if storable is not None:
        storable = msgspec.structs.replace(storable, sampling={**storable.sampling, **mark})
    return msgspec.structs.replace(parsed, request=request, storable=storable)


def _is_constrained(request: ChatRequest, level: Level) -> bool:
    if request.sampling.get("tool_choice") not in (None, "auto"):
        return False
    one_call = lax_values.lax_bool(request.sampling.get("parallel_tool_calls")) is False
    return level != "auto" or one_call or request.strict_tools
