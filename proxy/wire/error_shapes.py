"""Error formats: OpenAI's for most routes, Anthropic's for those under /messages."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
from starlette.types import Scope

from ratchet.proxy.errors import ContextOverflow, ProxyError, to_openai_error, with_openai_shape
from ratchet.proxy.wire.context_limit import parse_context_overflow

_ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class ErrorShape(Protocol):
    """The JSON error bodies of one API."""

    def encode_error(self, error: ProxyError) -> bytes:
        """Return the body for an error of the proxy."""

    def encode_upstream_error(self, status: int, body: bytes) -> tuple[bytes, str]:
        """Return an upstream's error body in this format, and its message."""


class OpenAIErrorShape:
    """`{"error": {message, type, param, code}}`."""

    def encode_error(self, error: ProxyError) -> bytes:
        """Return the body for an error of the proxy."""
        return to_openai_error(error)

    def encode_upstream_error(self, status: int, body: bytes) -> tuple[bytes, str]:
        """Return an upstream's error body in this format, and its message."""
        shaped, message = with_openai_shape(status, body)
        overflow = parse_context_overflow(status, message)
        return (self.encode_error(overflow), message) if overflow else (shaped, message)


class AnthropicErrorShape:
    """`{"type": "error", "error": {type, message}}`, with `details.error_code` if the error has a code."""

    def encode_error(self, error: ProxyError) -> bytes:
        """Return the body for an error of the proxy."""
        message = _too_long(error) if isinstance(error, ContextOverflow) else error.for_client
        return msgspec.json.encode(_anthropic(error.status, message, error.code))

    def encode_upstream_error(self, status: int, body: bytes) -> tuple[bytes, str]:
        """Return an upstream's error body in this format, and its message."""
        _, message = with_openai_shape(status, body)
        if overflow := parse_context_overflow(status, message):
            return self.encode_error(overflow), message
        return msgspec.json.encode(_anthropic(status, message, None)), message


def _too_long(error: ContextOverflow) -> str:
    """Return the message that makes Anthropic's clients shorten the conversation."""
    if error.prompt_tokens is not None and error.prompt_tokens > error.limit:
        return f"prompt is too long: {error.prompt_tokens} tokens > {error.limit} maximum"
    return f"prompt is too long: {error}"


def _anthropic(status: int, message: str, code: str | None) -> dict[str, Any]:
    kind = _ANTHROPIC_KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    error: dict[str, Any] = {"type": kind, "message": message}
    if code:
        error["details"] = {"error_code": code}
    return {"type": "error", "error": error}


OPENAI = OpenAIErrorShape()
ANTHROPIC = AnthropicErrorShape()


def error_shape_of(scope: Scope) -> ErrorShape:
    """Return the error format for a request, by its path or by the header that Anthropic's SDKs send."""
    if scope["path"].endswith(("/messages", "/messages/count_tokens")) or speaks_anthropic(scope):
        return ANTHROPIC
    return OPENAI


def speaks_anthropic(scope: Scope) -> bool:
    """Return whether the request has Anthropic's version header, as its SDKs send on every route."""
    return any(name == b"anthropic-version" for name, _ in scope["headers"])
