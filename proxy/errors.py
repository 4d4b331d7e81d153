"""The proxy's errors, each with the HTTP answer that it becomes.

    ProxyError
    |-- BadRequest            400  the body is not what the route takes
    |-- WrongKey              401  no key, or one that is not known
    |-- Forbidden             403  this door is not for the one who knocks; the message says how it is opened
    |-- NotFound              404  no such route, record or model; the message lists what exists
    |-- MethodNotAllowed      405  the route takes other methods; the header `allow` lists them
    |-- BodyTooLarge          413
    |-- UnknownEncoding       415  the body is compressed in a way that cannot be read here
    |-- RateLimited           429  the key's requests or tokens of this minute are used up; the headers say until when
    |-- TooManyWaiting        429  too many requests of the key wait for records that are not in the store yet
    |-- TooManyBytes          429  the key's requests under way hold too many bytes; it may try again (retry-after)
    |-- NotReady              503  the proxy cannot answer yet; the client may try again (retry-after)
    |-- UpstreamError
    |   |-- UpstreamUnreachable  502  no connection; the message names the upstream
    |   |-- UpstreamBroke        502  the answer broke off or cannot be read
    |   |-- UpstreamTimeout      504  no whole answer in time
    |   |-- UpstreamRefused           its own status; told in a stream that has begun
    |   `-- ContextOverflow      400  the prompt is longer than the model's context; the message tells both lengths
    `-- StartError            the proxy cannot start; the message names the setting and the remedy

`ClientLeft` is no answer at all: nobody is there to read one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec


class ProxyError(Exception):
    """Root of everything that the proxy raises on purpose."""

    status = 500
    kind = "server_error"
    code: str | None = None
    retry_after: int | None = None  # seconds
    headers: Sequence[tuple[bytes, bytes]] = ()  # of the answer

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code or self.code


class BadRequest(ProxyError):
    """The request's body or headers are not what the route takes."""

    status = 400
    kind = "invalid_request_error"


class WrongKey(ProxyError):
    """The request has no API key, or one that this proxy does not know."""

    status = 401
    kind = "authentication_error"
    code = "invalid_api_key"


class Forbidden(ProxyError):
    """The request comes from where none may come, or its key does not open this route."""

    status = 403
    kind = "permission_error"
    code = "forbidden"


class NotFound(ProxyError):
    """No such route, record or model."""

    status = 404
    kind = "invalid_request_error"


class MethodNotAllowed(ProxyError):
    """The route exists and takes other methods."""

    status = 405
    kind = "invalid_request_error"
    code = "method_not_allowed"

    def __init__(self, message: str, allow: str) -> None:
        super().__init__(message)
        self.headers = ((b"allow", allow.encode()),)


class BodyTooLarge(ProxyError):
    """The body is above the `max_body_bytes` setting."""

    status = 413
    kind = "invalid_request_error"


class UnknownEncoding(ProxyError):
    """The request's `content-encoding` is none that the proxy reads."""

    status = 415
    kind = "invalid_request_error"
    code = "unsupported_content_encoding"


class RateLimited(ProxyError):
    """The key has used up its `requests` or `tokens` (the kind) of this minute."""

    status = 429
    code = "rate_limit_exceeded"

    def __init__(self, message: str, kind: str, headers: Sequence[tuple[bytes, bytes]]) -> None:
        super().__init__(message)
        self.kind = kind
        self.headers = headers


class TooManyWaiting(ProxyError):
    """Too many requests of one key wait for records that are not in the store, and may never come."""

    status = 429
    kind = "requests"
    code = "too_many_waiting"
    retry_after = 1


class TooManyBytes(ProxyError):
    """The requests of one key that are under way hold as many bytes as a key's may."""

    status = 429
    kind = "requests"
    code = "too_many_bytes"
    retry_after = 1


class NotReady(ProxyError):
    """Something that the answer needs is not there yet."""

    status = 503
    kind = "service_unavailable"
    retry_after = 1


class UpstreamError(ProxyError):
    """vLLM did not answer as it should."""

    status = 502
    kind = "upstream_error"
    may_have_begun = False  # whether the replica may have begun with the request


class UpstreamUnreachable(UpstreamError):
    """There is no connection to vLLM."""

    code = "upstream_unreachable"


class UpstreamBroke(UpstreamError):
    """vLLM's answer broke off, or is not what vLLM answers."""

    code = "upstream_disconnected"
    may_have_begun = True


class UpstreamTimeout(UpstreamError):
    """vLLM did not answer within the `request_timeout_seconds` setting."""

    status = 504
    code = "upstream_timeout"


class UpstreamRefused(UpstreamError):
    """vLLM's own refusal, of which only a stream's event can tell: the client has the response's head."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
        self.code = "rate_limit_exceeded" if status == 429 else f"status_{status}"


class ContextOverflow(UpstreamError):
    """The prompt is longer than the model's context. `limit` and `asked` are tokens, `asked` only where it is told."""

    status = 400
    kind = "invalid_request_error"
    code = "context_length_exceeded"

    def __init__(self, message: str, *, limit: int, asked: int | None, param: str) -> None:
        super().__init__(message, param=param)
        self.limit = limit
        self.asked = asked


class StartError(ProxyError):
    """The proxy cannot start."""


class ClientLeft(Exception):
    """The client closed its connection, before it had sent its request or before its answer could be sent."""


def to_openai_error(error: ProxyError) -> bytes:
    """Return the error as OpenAI's JSON body."""
    return openai_error(str(error), error.kind, param=error.param, code=error.code)


def openai_error(message: str, kind: str, *, param: str | None = None, code: str | int | None = None) -> bytes:
    """Return `{"error": {message, type, param, code}}` as JSON."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def with_openai_shape(status: int, body: bytes) -> tuple[bytes, str]:
    """Return an upstream's error body in OpenAI's shape, and its message.

    A body that has the shape stays byte for byte; anything else (a load balancer's page, vLLM's older flat form)
    is wrapped, so that a client can always read `error.message`.
    """
    try:
        parsed: Any = msgspec.json.decode(body)
    except msgspec.DecodeError:
        parsed = None
    if isinstance(parsed, dict):
        inner = parsed.get("error")
        if isinstance(inner, dict) and isinstance(inner.get("message"), str):
            return body, inner["message"]
        message = next((str(parsed[name]) for name in ("message", "detail", "error") if parsed.get(name)), None)
    else:
        message = body[:2000].decode("utf-8", "replace").strip()
    message = message or f"the upstream answered {status} without a message"
    return openai_error(message, "upstream_error", code=status), message
