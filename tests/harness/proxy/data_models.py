"""vLLM's parsing of a request, by pydantic itself, and its error for a prompt that is too long."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, TypeAdapter


class _Call(BaseModel):
    function: dict[str, Any]


_BOOLEAN: TypeAdapter[bool | None] = TypeAdapter(bool | None)
_NUMBER: TypeAdapter[int | None] = TypeAdapter(int | None)
_CALLS: TypeAdapter[Any] = TypeAdapter(list[list[_Call] | None])
_NAMES = ("stream", "echo", "use_beam_search", "return_token_ids")


def as_read(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body with its booleans and `n`; `logprobs` of a text completion is a number. Raises ValidationError."""
    names = _NAMES if "prompt_ids" in body else (*_NAMES, "logprobs")
    read = {name: _BOOLEAN.validate_python(body[name]) for name in names if name in body}
    _CALLS.validate_python([message.get("tool_calls") for message in body["messages"]])
    return body | read | ({"n": _NUMBER.validate_python(body["n"])} if "n" in body else {})


def too_long(length: int, limit: int) -> str:
    """Return vLLM's error message for a prompt that is too long."""
    result = (
        f"This model's maximum context length is {limit} tokens. However, your prompt contains {length} input tokens"
    )
    return (
        f"{result}, which exceeds this limit even without any output tokens. (parameter=input_tokens, value={length})"
    )
