"""How vLLM's data models read a request: booleans by pydantic itself; and how a prompt that is too long is refused."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

_BOOLEAN: TypeAdapter[bool | None] = TypeAdapter(bool | None)
_NAMES = ("stream", "echo", "use_beam_search", "return_token_ids")


def as_read(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body with its booleans; `logprobs` of a text completion is a number. Raises ValidationError."""
    names = _NAMES if "prompt_ids" in body else (*_NAMES, "logprobs")
    return body | {name: _BOOLEAN.validate_python(body[name]) for name in names if name in body}


def too_long(length: int, limit: int) -> str:
    """Return how vLLM refuses a prompt."""
    told = f"This model's maximum context length is {limit} tokens. However, your prompt contains {length} input tokens"
    return f"{told}, which exceeds this limit even without any output tokens. (parameter=input_tokens, value={length})"
