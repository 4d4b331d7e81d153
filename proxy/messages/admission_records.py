"""The records of admission: what a worker says about a call, and how the call ended.

They are all that a decision about a call's place needs, so the decision can be made in another process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ratchet.proxy.messages.link_records import CallIdentity, Leaf, Placement
from ratchet.proxy.wire.request_body import FollowedCall


class AdmissionRequest(msgspec.Struct, frozen=True):
    """A call that asks for its placement.

    `is_partial`: `messages` and `keys` hold the last assistant message only, reduced to its role and tool-call ids.
    """

    model: str
    identity: CallIdentity
    key_id: str | None
    agents: frozenset[str] | None  # that the key is limited to
    models: frozenset[str] | None  # of `model_list`, that the key is limited to
    prompt_node: str  # hash of the last message; empty without one
    tools_hash: str
    messages: Sequence[dict[str, Any]]
    keys: tuple[str, ...]  # link keys of the messages
    answer_digests: bytes  # of the assistant messages, one after the other; empty if `is_partial`
    follows: FollowedCall | None = None  # that the client names
    stored_tools_hash: str | None = None  # if redaction changed the tools
    is_partial: bool = False


class EndedCall(msgspec.Struct, frozen=True):
    """A call that has ended: its placement and its answers. `retryable`: its client may send it again."""

    placement: Placement
    leaves: tuple[Leaf, ...]
    ended_at: float  # Unix seconds
    retryable: bool
