"""Answers and attempts as the store gives them back after a restart, for linking to take up.

Of the fingerprints, the path without the prompt's last message is not known any more; of the prompt only the first and
the last message are, which is where a task stands. Pure.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ratchet.proxy.messages.link_records import AttemptKey, Leaf, Link, TokenFingerprint
from ratchet.proxy.messages.text_fingerprints import NO_FINGERPRINTS, TextFingerprints, fingerprints_of
from ratchet.store.content import messages as canon
from ratchet.store.records import OpenLeaf, UnansweredCall

_decode = msgspec.json.Decoder(dict[str, Any]).decode


def leaf_from_store(known: OpenLeaf) -> Leaf:
    """Return the leaf of a stored answer."""
    return Leaf(
        trajectory_id=known.trajectory_id,
        call_id=known.call_id,
        choice=known.choice,
        version=known.version,
        link_key=known.link_key,
        tool_call_ids=known.tool_call_ids,
        key_id=known.key_id,
        sequence=TokenFingerprint.of(known.sequence),
        created_at=known.last_active_at,
        purpose=known.purpose,
        is_extended=known.extended,
        fingerprints=_traces(known),
    )


def attempt_from_store(known: UnansweredCall, parent: Leaf | None) -> tuple[AttemptKey, Link, float]:
    """Return an unanswered attempt: what names it, where it belongs, and when it ended."""
    link = Link(known.trajectory_id, known.version, known.linked_by, parent, known.purpose, known.key_id)
    return AttemptKey(known.key_id, known.prompt_node, known.tools_hash), link, known.ended_at


def _traces(known: OpenLeaf) -> TextFingerprints:
    if not known.reply:
        return NO_FINGERPRINTS
    answer = _decode(known.reply)
    (own,) = canon.answer_keys([canon.ANYWHERE], answer)
    return fingerprints_of(answer, "", own, [_decode(body) for body in known.asked])
