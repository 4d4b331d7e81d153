"""The context limit of the replicas, and whether a request is known to exceed it.

Only token ids can be counted here. The tokens of a text, or of messages after a chat template, are counted by the
engine before it generates; `parse_context_overflow` reads its error. So no request that fits is rejected.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ratchet.proxy.errors import ContextOverflow
from ratchet.proxy.wire.request_body import ChatRequest

# The messages of vLLM's renderers and its engine, of earlier releases and of other servers.
_LIMIT = re.compile(r"maximum (?:context|model) length(?: is| of)? \(?(\d+)|context length is only (\d+)")
_PROMPT_TOKENS = re.compile(
    r"(?:contains|has|passed|resulted in|requested)(?: at least)? (\d+) (?:input )?tokens"
    r"|Input length \((\d+)\)|prompt \(length (\d+)\)"
)


def max_context_length(cards: Iterable[dict[str, Any]]) -> int | None:
    """Return the longest context in a list of model cards in tokens; None if unknown."""
    lengths = [card.get("max_model_len") for card in cards]
    return max((length for length in lengths if isinstance(length, int)), default=None)


def find_context_overflow(request: ChatRequest, limits: Iterable[int | None]) -> ContextOverflow | None:
    """Return the error for a prompt of token ids that no replica can serve; None if unknown."""
    known = list(limits)
    limit = max((length for length in known if length is not None), default=0)
    if None in known or not limit or "truncate_prompt_tokens" in request.fields:
        return None
    prompt = request.messages[0].get("content") if request.messages[0].get("role") == "prompt" else None
    if not isinstance(prompt, list) or not prompt:
        return None
    prompts = [prompt] if isinstance(prompt[0], int) else [ids for ids in prompt if isinstance(ids, list)]
    prompt_tokens = max(map(len, prompts), default=0)
    if prompt_tokens < limit:  # at least one token must be left for the completion
        return None
    return ContextOverflow(
        f"This model's maximum context length is {limit} tokens. However, your prompt contains {prompt_tokens} input "
        "tokens. Please reduce the length of the prompt.",
        limit=limit,
        prompt_tokens=prompt_tokens,
        param="prompt",
    )


def parse_context_overflow(status: int, message: str) -> ContextOverflow | None:
    """Return an upstream's error as ContextOverflow if its message says that the context is too long."""
    found = _LIMIT.search(message) if status == 400 else None
    if found is None:
        return None
    prompt_tokens = _PROMPT_TOKENS.search(message)
    return ContextOverflow(
        message, limit=_number(found), prompt_tokens=_number(prompt_tokens) if prompt_tokens else None, param="messages"
    )


def _number(found: re.Match[str]) -> int:
    return next(int(group) for group in found.groups() if group is not None)
