"""Whether vLLM holds the tool calls of a request to a grammar, so that their tokens were not the policy's own choice.

By vLLM 0.32's rules for `tool_choice: auto` (what forces a call stands in the sampling parameters by itself): where a
tool is `strict`, where `parallel_tool_calls` is false, and with any tools at the server's levels `function` and
`parameter`. At `off`, where VLLM_ENFORCE_STRICT_TOOL_CALLING=0, never. Pure.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ratchet.proxy.dialects.dialect import ParsedRequest
from ratchet.proxy.wire import lax_values
from ratchet.proxy.wire.request_body import ChatRequest
from ratchet.store.records import TOOL_GRAMMAR

Level = Literal["off", "auto", "function", "parameter"]  # vLLM's --tool-strict-level, and off


def noted(asked: ParsedRequest, level: Level) -> ParsedRequest:
    """Return a request with tools, with a note among its sampling parameters where a grammar holds their calls."""
    if level == "off" or not _holds(asked.request, level):
        return asked
    mark: dict[str, Any] = {TOOL_GRAMMAR: True}
    request = msgspec.structs.replace(asked.request, sampling={**asked.request.sampling, **mark})
    kept = asked.storable and msgspec.structs.replace(asked.storable, sampling={**asked.storable.sampling, **mark})
    return msgspec.structs.replace(asked, request=request, storable=kept)


def _holds(request: ChatRequest, level: Level) -> bool:
    if request.sampling.get("tool_choice") not in (None, "auto"):
        return False
    one_call = lax_values.lax_bool(request.sampling.get("parallel_tool_calls")) is False
    return level != "auto" or one_call or request.strict_tools
