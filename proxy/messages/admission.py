"""What a worker and the coordinator exchange when a call begins: who the request says it is, and where it is placed."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from ratchet.proxy.messages.link_records import AttemptKey, Link
from ratchet.store.records.tuning import Prompt


class CallIdentity(NamedTuple):
    """What path, headers, key and body of a request say about its place."""

    trajectory: str | None  # the explicit trajectory id
    named_by: str  # path, header, body, key or previous_response; empty without an id
    task: str | None
    role: str | None
    tags: tuple[str, ...]
    is_retry: bool  # the SDK marked it as a retry


class Placement(msgspec.Struct, frozen=True):
    """Where a call belongs and which version serves it. Fixed when the call begins."""

    alias: str
    version: int
    link: Link  # trajectory, parent answer, purpose
    attempt: AttemptKey  # identifies retries of this call
    started_at: float  # Unix seconds
    task: str | None
    prompt: Prompt | None  # the system prompt to substitute
