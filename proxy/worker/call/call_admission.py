"""What a worker needs of admission: the coordinator's own in the same process, or `coordination`'s over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from ratchet.proxy.coordinator.keys.key_cache import Caller
from ratchet.proxy.dialects.dialect import ParsedRequest
from ratchet.proxy.messages.admission_records import AdmissionRequest
from ratchet.proxy.messages.link_records import CallIdentity, Leaf, Placement
from ratchet.store.records import CallEnded, CallStarted


class CallAdmission(Protocol):
    """Places calls when they begin, and records their ends."""

    async def resolve(self, request: AdmissionRequest) -> Placement:
        """Return the placement of a call; each needs one `end_call`. Raises ProxyError."""

    def end_call(
        self, placement: Placement, record: CallEnded | None, leaves: Sequence[Leaf], now: float, *, retryable: bool
    ) -> asyncio.Future[bool] | None:
        """Close a call; return what its last byte waits for, if anything. `retryable`: it may be sent again."""

    def mark_unanswered(self, placement: Placement) -> None:
        """Record that the answer of an ended call did not reach its client, which may retry."""

    def task_family(self, placement: Placement, start: CallStarted) -> str:
        """Return the task family of a call's trajectory."""


def admission_request(parsed: ParsedRequest, identity: CallIdentity, caller: Caller) -> AdmissionRequest:
    """Return what a call says about its place."""
    request = parsed.request
    return AdmissionRequest(
        model=request.model,
        identity=identity,
        key_id=caller.key_id,
        agents=caller.access.agents,
        models=caller.access.models,
        prompt_node=parsed.prompt_node,
        tools_hash=request.tools_hash,
        messages=request.messages,
        keys=parsed.keys,
        answer_digests=request.answer_digests,
        follows=request.follows,
        stored_tools_hash=parsed.storable.tools_hash if parsed.storable else None,
    )
