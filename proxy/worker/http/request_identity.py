"""Reads the identity of a call from its path, headers, key and body: trajectory, task, role, tags, retry mark."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

import msgspec
from starlette.types import Scope

from ratchet.proxy.errors import BadRequest
from ratchet.proxy.messages.link_records import CallIdentity
from ratchet.proxy.wire.asgi import CALLER, DEPLOYMENT, TRAJECTORY
from ratchet.proxy.wire.request_body import ChatRequest

_ID = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._:~@+=-]{1,100}")  # "." and "..": no URL can name them
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_SESSION_HEADERS = (b"x-session-id", b"x-claude-code-session-id")
_RETRY_COUNT = b"x-stainless-retry-count"
_TRACE_HEADERS = (b"traceparent", b"tracestate")


def read_identity(scope: Scope, headers: Mapping[bytes, bytes], request: ChatRequest) -> CallIdentity:
    """Return the identity of a call. Raises BadRequest for an invalid trajectory id."""
    trajectory, named_by = _named_trajectory(scope, headers, request)
    task, role, tags = read_labels(headers)
    is_retry = headers.get(_RETRY_COUNT, b"0") not in (b"0", b"")
    return CallIdentity(trajectory, named_by, task, role, tags, is_retry, request.user)


def _named_trajectory(scope: Scope, headers: Mapping[bytes, bytes], request: ChatRequest) -> tuple[str | None, str]:
    """Return the explicit trajectory id, and where it was found. Raises BadRequest."""
    for named_by, value in (
        ("path", scope[TRAJECTORY]),
        ("header", _header_id(headers)),
        ("body", request.trajectory),
        ("key", scope[CALLER].trajectory),
        ("previous_response", request.follows.trajectory_id if request.follows else None),
    ):
        if value:
            if not _ID.fullmatch(value):
                raise BadRequest(
                    f"trajectory id {value[:120]!r} (from the {named_by}) must be 1 to 100 of the characters "
                    f"A-Z a-z 0-9 . _ : ~ @ + = - and not . or .. alone"
                )
            return value, named_by
    return None, ""


def _header_id(headers: Mapping[bytes, bytes]) -> str | None:
    """Return the trajectory id from the headers.

    Agents that know nothing of trajectories send ids of sessions too: one in another format is named by its hash.
    """
    if name := _text(headers, b"x-ratchet-trajectory"):
        return name
    session = next((found for name in _SESSION_HEADERS if (found := _text(headers, name))), None)
    if session is None or _ID.fullmatch(session):
        return session
    return f"session-{hashlib.blake2b(session.encode(), digest_size=16).hexdigest()}"


def with_deployment(scope: Scope, body: bytes) -> bytes:
    """Return a JSON body with the path's deployment as its model; clients of Azure OpenAI may name another or none."""
    name = scope[DEPLOYMENT]
    if name is None:
        return body
    return body.rstrip().removesuffix(b"}") + b',"model":' + msgspec.json.encode(name) + b"}"  # the last one counts


def trajectory_outside_body(scope: Scope, headers: Mapping[bytes, bytes]) -> str | None:
    """Return the trajectory id from path, header or key, for a body that is not parsed."""
    name: str | None = scope[TRAJECTORY] or _header_id(headers) or scope[CALLER].trajectory
    return name


def request_id(headers: Mapping[bytes, bytes], default: str) -> bytes:
    """Return the client's own request id if it is valid, else `default`."""
    value = headers.get(b"x-request-id", b"")
    return value if _REQUEST_ID.fullmatch(value) else default.encode()


def read_labels(headers: Mapping[bytes, bytes]) -> tuple[str | None, str | None, tuple[str, ...]]:
    """Return (task, role, tags) from the headers."""
    tags = (_text(headers, b"x-ratchet-tags") or "").split(",")
    role = _text(headers, b"x-ratchet-role")
    return (
        _text(headers, b"x-ratchet-task"),
        role[:128] if role else None,
        tuple(tag.strip() for tag in tags if tag.strip())[:32],
    )


def trace_headers(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    """Return the W3C trace headers."""
    return {name.decode(): headers[name].decode("latin-1") for name in _TRACE_HEADERS if name in headers}


def _text(headers: Mapping[bytes, bytes], name: bytes) -> str | None:
    value = headers.get(name)
    return (value.decode("utf-8", "replace").strip() or None) if value else None
