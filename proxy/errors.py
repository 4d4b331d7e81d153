"""The proxy's errors, each with the HTTP response that it becomes.

Messages of an UpstreamError name the upstream's URL, for log and record. Clients get them without (`for_client`).
`ClientDisconnected` has no response: nobody is connected to read one.
A class exists for each error that code catches by name or that `ratchet_errors_total` counts under its own label.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from ratchet.errors import RatchetError

log = logging.getLogger("ratchet.proxy")


class ProxyError(RatchetError):
    """Base class of all errors that the proxy raises on purpose."""

    status = 500
    kind = "server_error"
    code: str | None = None
    retry_after: int | None = None  # seconds
    headers: Sequence[tuple[bytes, bytes]] = ()  # of the response

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int | None = None
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code or self.code
        self.status = status or self.status

    @property
    def for_client(self) -> str:
        """The message that the client gets."""
        return str(self)


class BadRequest(ProxyError):
    """The request is invalid."""

    status = 400
    kind = "invalid_request_error"


def method_not_allowed(message: str, allow: str) -> BadRequest:
    """Return the error for a route that takes other methods: those listed in `allow`."""
    error = BadRequest(message, code="method_not_allowed", status=405)
    error.headers = ((b"allow", allow.encode()),)
    return error


class InvalidApiKey(ProxyError):
    """The request has no API key, or an unknown one."""

    status = 401
    kind = "authentication_error"
    code = "invalid_api_key"


class Forbidden(ProxyError):
    """The request's origin or its API key does not allow this route."""

    status = 403
    kind = "permission_error"
    code = "forbidden"


class NotFound(ProxyError):
    """No such route, record or model."""

    status = 404
    kind = "invalid_request_error"


class BodyTooLarge(ProxyError):
    """The body is larger than the `max_body_bytes` setting."""

    status = 413
    kind = "invalid_request_error"


class RateLimited(ProxyError):
    """A limit of the API key is reached.

    Args:
        message: the limit and the remedy.
        code: `rate_limit_exceeded`, `too_many_parallel_requests`, `too_many_waiting` or `too_many_bytes`.
        kind: `requests` or `tokens`.
        headers: of the response; without them the client may retry after a second.
    """

    status = 429

    def __init__(
        self, message: str, *, code: str, kind: str = "requests", headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        super().__init__(message, code=code)
        self.kind = kind
        self.headers = headers
        self.retry_after = None if headers else 1


class NotReady(ProxyError):
    """Something that the response needs is not available yet."""

    status = 503
    kind = "service_unavailable"
    retry_after = 1


def not_looked_up(what: str, error: Exception, code: str | None = None) -> NotReady:
    """Return the error of a request that needs a record of the store; the log gets the reason, with addresses."""
    log.warning("event=store_lookup_failed what=%r reason=%r", what, str(error))
    return NotReady(f"{what} cannot be looked up, since the store cannot be read: retry", code=code)


def stopped() -> NotReady:
    """Return the error of a request that the server cancels because it stops."""
    return NotReady("this proxy was stopped before its answer was complete: retry the request")


class UpstreamError(ProxyError):
    """vLLM did not answer as it should.

    Args:
        message: for everybody. With a `url`, it is what this upstream did, without a subject.
        url: the upstream's, for log and record only.
        detail: further text, for log and record only: it may contain internal addresses and paths.
    """

    status = 502
    kind = "upstream_error"
    may_have_started = False  # whether the replica may have started to process the request
    model: str | None = None  # whose upstream it is, if known

    def __init__(
        self,
        message: str,
        *,
        url: str | None = None,
        detail: str | None = None,
        param: str | None = None,
        code: str | None = None,
        status: int | None = None,
    ) -> None:
        subject = "" if url is None else f"upstream {url} "
        super().__init__(
            f"{subject}{message}" + (f": {detail}" if detail else ""), param=param, code=code, status=status
        )
        self._has_subject = url is None
        self._public = message

    @property
    def for_client(self) -> str:
        """The message without URL and detail; it names the model, if that is known."""
        if self._has_subject:
            return self._public
        return f"the upstream of {self.model} {self._public}" if self.model else f"the upstream {self._public}"


class UpstreamUnreachable(UpstreamError):
    """There is no connection to vLLM."""

    code = "upstream_unreachable"


class UpstreamDisconnected(UpstreamError):
    """vLLM's response broke off, or is not a valid vLLM response."""

    code = "upstream_disconnected"
    may_have_started = True


class UpstreamTimeout(UpstreamError):
    """vLLM did not answer within the `request_timeout_seconds` setting."""

    status = 504
    code = "upstream_timeout"


class ContextOverflow(UpstreamError):
    """The prompt is longer than the model's context. `limit` and `prompt_tokens` are tokens."""

    status = 400
    kind = "invalid_request_error"
    code = "context_length_exceeded"

    def __init__(self, message: str, *, limit: int, prompt_tokens: int | None, param: str) -> None:
        super().__init__(message, param=param)
        self.limit = limit
        self.prompt_tokens = prompt_tokens  # None if unknown


class ClientDisconnected(Exception):
    """The client closed its connection before the request had arrived or the response could be sent."""


def upstream_refusal(message: str, status: int) -> UpstreamError:
    """Return vLLM's own error response as an error, for a stream whose headers the client already has."""
    return UpstreamError(message, code="rate_limit_exceeded" if status == 429 else f"status_{status}", status=status)


def to_openai_error(error: ProxyError) -> bytes:
    """Return the error as OpenAI's JSON body."""
    return openai_error(error.for_client, error.kind, param=error.param, code=error.code)


def openai_error(message: str, kind: str, *, param: str | None = None, code: str | int | None = None) -> bytes:
    """Return `{"error": {message, type, param, code}}` as JSON."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def with_openai_shape(status: int, body: bytes) -> tuple[bytes, str]:
    """Return an upstream's error body in OpenAI's shape, and its message.

    A body in OpenAI's shape stays unchanged. Anything else (a load balancer's page, vLLM's older flat form) is wrapped:
    a client can always read `error.message`.
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
