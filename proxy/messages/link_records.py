"""The records of linking: an answer that may be continued, what a request says of itself, and the link between them.

They hold; they decide nothing. All but the flags of a leaf never change.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from ratchet.proxy.messages.text_fingerprints import NO_FINGERPRINTS, TextFingerprints
from ratchet.store.records import OTHER


class TokenFingerprint(msgspec.Struct, frozen=True):
    """A token sequence by length in bytes (int32 each) and hash: enough to say what begins with it."""

    length: int
    digest: bytes

    @classmethod
    def of(cls, packed: bytes) -> TokenFingerprint:
        """Return the fingerprint of packed ids."""
        return cls(len(packed), blake2b(packed, digest_size=16).digest())

    def begins(self, packed: bytes) -> bool:
        """Return whether `packed` begins with this sequence, id for id."""
        if not self.length or len(packed) < self.length:
            return False
        return blake2b(memoryview(packed)[: self.length], digest_size=16).digest() == self.digest


class Leaf(msgspec.Struct, eq=False):
    """An answer that a coming request may continue. `extended`: one did; `taken`: one did, or continued another answer
    of the same call; `quoted`: a segment was found by its words.
    """

    trajectory_id: str
    call_id: str
    choice: int
    version: int
    link_key: str
    tool_call_ids: tuple[str, ...]
    key_id: str | None
    sequence: TokenFingerprint
    created_at: float
    purpose: str = "live"
    is_extended: bool = False
    is_quoted: bool = False
    is_taken: bool = False
    fingerprints: TextFingerprints = NO_FINGERPRINTS


class AttemptKey(NamedTuple):
    """What names an attempt: whoever tries again asks the same under the same key."""

    key_id: str | None
    prompt_node: str
    tools_hash: str


class Evidence(msgspec.Struct, frozen=True):
    """What a request says about where it belongs. `keys` are the link keys of its messages, in order."""

    alias: str
    version: int | None  # where the client asked for one by name
    messages: Sequence[dict[str, Any]]
    keys: tuple[str, ...]
    key_id: str | None
    explicit: str | None = None
    explicit_by: str = ""  # path, header, body, key, previous_response
    follows: str | None = None  # the call that a `previous_response_id` names
    attempt: AttemptKey | None = None
    is_retry: bool = False  # the SDK says that it tries again
    arrived_at: float = 0.0  # Unix seconds
    is_other_model: bool = False  # the model is not trained here
    planned_purpose: str | None = None  # the purpose that a rollout's plan says

    @property
    def purpose(self) -> str:
        """`other` where the model is not trained here, else as planned; `eval` where a version is asked for by name."""
        if self.is_other_model:
            return OTHER
        if self.planned_purpose is not None:
            return self.planned_purpose
        return "live" if self.version is None else "eval"


class Link(msgspec.Struct, frozen=True):
    """Where a call belongs. `version` is None where the trajectory is new and has none yet.

    A call without a parent begins a segment: the first of its trajectory, or one that `quoted` words or ids of it.
    """

    trajectory_id: str
    version: int | None
    linked_by: str
    parent: Leaf | None = None
    purpose: str = "live"
    key_id: str | None = None  # whose a new trajectory is
    quoted: Leaf | None = None
