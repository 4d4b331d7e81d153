"""How many bytes a remembered answer takes, with its places in the tables: an estimate that a test measures. Pure."""

from __future__ import annotations

from ratchet.proxy.messages.link_records import Leaf

TRAJECTORY_BYTES = 650  # of a trajectory without its answers
_LEAF = 850  # of an answer with the names that every answer has
_ID = 300  # of a tool call's id
_QUOTE = 500
_HEAD = 120


def size_of(leaf: Leaf) -> int:
    """Return the bytes of one answer."""
    seen = leaf.fingerprints
    size = _LEAF + _ID * len(leaf.tool_call_ids)
    for quote in seen.quotes:
        size += _QUOTE + _HEAD * len(quote.heads)
    return size + (_QUOTE + _HEAD * len(seen.whole.heads) if seen.whole else 0)
