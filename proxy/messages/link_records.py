"""The records of linking: a request's identity and evidence, an answer that may be continued, the link, the placement.

They hold data only. Everything but the flags of a leaf is constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from ratchet.proxy.messages.text_fingerprints import NO_FINGERPRINTS, TextFingerprints
from ratchet.store.records import OTHER, UNLINKED, Prompt, VersionDraw

_LENGTH_BYTES, _DIGEST_BYTES = 4, 11  # of a fingerprint; Python takes 48 bytes for 15, for 16 it takes 64
_MAX_STOPPED_BYTES = 2**16  # of a stopped answer's text


def token_fingerprint(packed: bytes | memoryview) -> bytes:
    """Return a sequence of packed token ids as its length in bytes and a hash: enough to recognize it as a prefix."""
    return len(packed).to_bytes(_LENGTH_BYTES, "big") + blake2b(packed, digest_size=_DIGEST_BYTES).digest()


class StoppedText(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What was generated of an answer until its client closed the connection; the client has a beginning of it.

    `before`: the short link key of the path before the answer. `text`: its visible text in UTF-8.
    """

    before: bytes
    text: bytes

    @classmethod
    def of(cls, before: bytes, text: str) -> StoppedText | None:
        """Return the stopped text of an answer; None if it is empty or too long to keep."""
        packed = _utf8(text) if len(text) <= _MAX_STOPPED_BYTES else b""
        return cls(before, packed) if 0 < len(packed) <= _MAX_STOPPED_BYTES else None

    def begins_with(self, text: str) -> bool:
        """Return whether the answer begins with this text."""
        return self.text.startswith(_utf8(text))


class AnswerDetails(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What is rarely read of an answer. `sequence`: the `token_fingerprint` of the prompt with the answer, if known."""

    call_id: str
    tool_call_ids: tuple[str, ...]
    created_at: float
    sequence: bytes = b""
    fingerprints: TextFingerprints = NO_FINGERPRINTS
    stopped: StoppedText | None = None


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(AnswerDetails).decode


class Leaf(msgspec.Struct, eq=False, gc=False):
    """An answer that a later request may continue.

    `is_extended`: a request continued it. `is_taken`: a request continued it or another answer of the same call.
    `is_quoted`: a segment was linked by a quote of it. `packed`: its `AnswerDetails` as MessagePack, which takes half
    of their memory; every property decodes them.
    """

    trajectory_id: str
    choice: int
    version: int
    link_key: bytes  # short
    key_id: str | None
    packed: bytes
    purpose: str = "live"
    is_extended: bool = False
    is_quoted: bool = False
    is_taken: bool = False

    @classmethod
    def of(
        cls,
        trajectory_id: str,
        call_id: str,
        choice: int,
        version: int,
        link_key: bytes,
        tool_call_ids: tuple[str, ...],
        key_id: str | None,
        sequence: bytes,
        created_at: float,
        purpose: str = "live",
        fingerprints: TextFingerprints = NO_FINGERPRINTS,
        *,
        is_extended: bool = False,
        stopped: StoppedText | None = None,
    ) -> Leaf:
        """Return the leaf of an answer."""
        packed = _pack(AnswerDetails(call_id, tool_call_ids, created_at, sequence, fingerprints, stopped))
        return cls(trajectory_id, choice, version, link_key, key_id, packed, purpose, is_extended)

    @property
    def details(self) -> AnswerDetails:
        """What is packed."""
        return _unpack(self.packed)

    @details.setter
    def details(self, details: AnswerDetails) -> None:
        self.packed = _pack(details)

    @property
    def call_id(self) -> str:
        """The id of its call."""
        return self.details.call_id

    @property
    def tool_call_ids(self) -> tuple[str, ...]:
        """The ids of its tool calls."""
        return self.details.tool_call_ids

    @property
    def created_at(self) -> float:
        """When its call ended: Unix seconds."""
        return self.details.created_at

    @property
    def fingerprints(self) -> TextFingerprints:
        """The fingerprints of its text."""
        return self.details.fingerprints

    @property
    def sequence(self) -> bytes:
        """The `token_fingerprint` of the prompt with the answer; empty if unknown."""
        return self.details.sequence

    @property
    def sequence_length(self) -> int:
        """The length of the token sequence in bytes."""
        return int.from_bytes(self.sequence[:_LENGTH_BYTES], "big")

    def is_prefix_of(self, packed: bytes) -> bool:
        """Return whether packed token ids start with the sequence of this answer."""
        length = self.sequence_length
        return 0 < length <= len(packed) and token_fingerprint(memoryview(packed)[:length]) == self.sequence


class AttemptKey(NamedTuple):
    """Identifies an attempt: a retry has the same agent, key, prompt and tools."""

    alias: str
    key_id: str | None
    prompt_node: str
    tools_hash: str


class LinkEvidence(msgspec.Struct, frozen=True):
    """What a request says about its trajectory. `keys` are the link keys of its messages, in order.

    `answer_digests` are those of its assistant messages (`store/content/messages.py`), one after the other.
    """

    alias: str
    version: int | None  # if the request names one
    messages: Sequence[dict[str, Any]]
    keys: tuple[str, ...]
    answer_digests: bytes
    key_id: str | None
    explicit: str | None = None
    explicit_by: str = ""  # path, header, body, key, previous_response
    follows: str | None = None  # the call of `previous_response_id`
    follows_unlinked: bool = False  # that call's trajectory may be the rest of another one
    attempt: AttemptKey | None = None
    is_retry: bool = False  # the SDK marked the request as a retry
    arrived_at: float = 0.0  # Unix seconds
    is_other_model: bool = False  # the model is not trained by this proxy
    planned_purpose: str | None = None  # the purpose in the rollout's plan
    is_partial: bool = False  # `messages` and `keys` hold the last assistant message only, without its answer digest

    @property
    def purpose(self) -> str:
        """`other_model` for other models, else as planned; `eval` if the request names a version."""
        if self.is_other_model:
            return OTHER
        if self.planned_purpose is not None:
            return self.planned_purpose
        return "live" if self.version is None else "eval"

    @property
    def purpose_if_new(self) -> str:
        """`purpose` of a named trajectory that is not known here: it may be the rest of another, as the call before."""
        return UNLINKED if self.follows_unlinked and self.purpose == "live" else self.purpose


class Link(msgspec.Struct, frozen=True):
    """A call's place. `version` is None for a new trajectory that has no version yet.

    A call without a parent starts a segment: the first one of its trajectory, or one whose prompt quotes `quoted`.
    """

    trajectory_id: str
    version: int | None
    linked_by: str
    parent: Leaf | None = None
    purpose: str = "live"
    key_id: str | None = None  # of a new trajectory
    quoted: Leaf | None = None


class CallIdentity(NamedTuple):
    """What path, headers, key and body of a request say about its place."""

    trajectory: str | None  # the explicit trajectory id
    named_by: str  # path, header, body, key or previous_response; empty without an id
    task: str | None
    role: str | None
    tags: tuple[str, ...]
    is_retry: bool  # the SDK marked it as a retry
    user: str | None = None  # the end user that the body names


class Placement(msgspec.Struct, frozen=True):
    """Where a call belongs and which version serves it. Fixed when the call begins."""

    alias: str
    version: int
    link: Link  # trajectory, parent answer, purpose
    attempt: AttemptKey  # identifies retries of this call
    started_at: float  # Unix seconds
    task: str | None
    prompt: Prompt | None  # the system prompt to substitute
    draw: VersionDraw | None = None  # of the version, if this call drew it
    number: int = 0  # of the call in its worker's session with the coordinator
    family: str | None = None  # task family, if a coordinator determined it
