"""Reads from a request's path, headers and body who it is: its explicit trajectory, task, role, tags, retry."""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import blake2b

from starlette.types import Scope

from ratchet.proxy.coordinator.rollouts.rollout_plans import RolloutPlan
from ratchet.proxy.errors import BadRequest
from ratchet.proxy.messages.link_records import AttemptKey, Evidence
from ratchet.proxy.wire.asgi import CALLER, TRAJECTORY
from ratchet.proxy.wire.request_body import ChatRequest

_ID = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._:~@+=-]{1,100}")  # "." and "..": no URL leads to them
_NO_ID = re.compile(r"[^A-Za-z0-9._:~@+=-]")
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")

Named = tuple[str | None, str]  # the trajectory, if one is named, and where: path, header, body, ...

RETRY = b"x-stainless-retry-count"


def evidence(
    headers: Mapping[bytes, bytes],
    request: ChatRequest,
    keys: tuple[str, ...],
    asked: tuple[str, int | None],
    attempt: AttemptKey,
    now: float,
    named: Named,
    other: bool = False,
    plan: RolloutPlan | None = None,
) -> Evidence:
    """Return what the request says about where it belongs, and what the plan of its rollout says, if it is of one."""
    explicit, by = named
    # A rollout on another model is the trajectory itself; else such a model only speaks beside one of an alias.
    if other and explicit is not None and not (plan and plan.model == asked[0]):
        explicit = beside(explicit, asked[0])
    return Evidence(
        alias=asked[0],
        version=asked[1],
        messages=request.messages,
        keys=keys,
        key_id=attempt.key_id,
        explicit=explicit,
        explicit_by=by,
        follows=request.follows[1] if request.follows else None,
        attempt=attempt,
        is_retry=headers.get(RETRY, b"0") not in (b"0", b""),
        arrived_at=now,
        is_other_model=other,
        planned_purpose=plan.purpose if plan else None,
    )


def beside(trajectory_id: str, model: str) -> str:
    """Return the id of what another model says within a trajectory: a trajectory itself is of one alias."""
    whole = f"{trajectory_id}~{_NO_ID.sub('_', model)}"
    return whole if len(whole) <= 128 else f"{trajectory_id}~{blake2b(model.encode(), digest_size=8).hexdigest()}"


def named(scope: Scope, headers: Mapping[bytes, bytes], request: ChatRequest) -> Named:
    """Return the trajectory that the request names, and where. Raises BadRequest for an id that cannot be one."""
    for by, value in (
        ("path", scope[TRAJECTORY]),
        ("header", _text(headers, b"x-ratchet-trajectory") or _text(headers, b"x-session-id")),
        ("body", request.trajectory),
        ("key", scope[CALLER].trajectory),
        ("previous_response", request.follows[0] if request.follows else None),
    ):
        if value:
            if not _ID.fullmatch(value):
                raise BadRequest(
                    f"trajectory id {value[:120]!r} (from the {by}) must be 1 to 100 of the characters "
                    f"A-Z a-z 0-9 . _ : ~ @ + = - and not . or .. alone"
                )
            return value, by
    return None, ""


def trajectory_outside_body(scope: Scope, headers: Mapping[bytes, bytes]) -> str | None:
    """Return the trajectory that a request names outside its body, whose dialect nobody reads here."""
    said = _text(headers, b"x-ratchet-trajectory") or _text(headers, b"x-session-id")
    name: str | None = scope[TRAJECTORY] or said or scope[CALLER].trajectory
    return name


def request_id(headers: Mapping[bytes, bytes], name: str) -> bytes:
    """Return the client's own request id where it is usable, else `name`, the call's id."""
    given = headers.get(b"x-request-id", b"")
    return given if _REQUEST_ID.fullmatch(given) else name.encode()


def labels(headers: Mapping[bytes, bytes]) -> tuple[str | None, str | None, tuple[str, ...]]:
    """Return (task, role, tags) that the client gave."""
    tags = (_text(headers, b"x-ratchet-tags") or "").split(",")
    role = _text(headers, b"x-ratchet-role")
    return (
        _text(headers, b"x-ratchet-task"),
        role[:128] if role else None,
        tuple(tag.strip() for tag in tags if tag.strip())[:32],
    )


def trace(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    """Return the tracing headers, which go on to vLLM."""
    return {
        name.decode(): headers[name].decode("latin-1") for name in (b"traceparent", b"tracestate") if name in headers
    }


def _text(headers: Mapping[bytes, bytes], name: bytes) -> str | None:
    value = headers.get(name)
    return (value.decode("utf-8", "replace").strip() or None) if value else None
