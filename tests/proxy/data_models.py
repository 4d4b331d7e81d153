"""The booleans of a request as vLLM's data models read them, by pydantic itself."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

_BOOLEAN: TypeAdapter[bool | None] = TypeAdapter(bool | None)
_NAMES = ("stream", "echo", "use_beam_search", "return_token_ids")


def as_read(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body with its booleans; `logprobs` of a text completion is a number. Raises ValidationError."""
    names = _NAMES if "prompt_ids" in body else (*_NAMES, "logprobs")
    return body | {name: _BOOLEAN.validate_python(body[name]) for name in names if name in body}
