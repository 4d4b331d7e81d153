"""The answers of one key to one alias that may be continued, indexed by everything that a later prompt may repeat.

Each index holds one key's answers to one alias: a call never searches another key's traffic.
"""

from __future__ import annotations

from collections.abc import Collection

from ratchet.proxy.coordinator.linking.quote_index import LeavesByName, QuoteIndex
from ratchet.proxy.messages.link_records import Leaf
from ratchet.proxy.messages.text_fingerprints import QuotedText, is_distinctive_id, short_key

# Estimates in bytes, entries in the tables included; a test measures them.
TRAJECTORY_BYTES = 650  # of a trajectory without its answers
_LEAF_BYTES = 600  # of an answer with the names that every answer has
_ID_BYTES = 190  # of a tool call's id
_QUOTE_BYTES = 290
_PREFIX_BYTES = 120


class LeafIndex:
    """Leaves by link key, by tool call and by quoted text. All kinds of link keys share one table: none are equal."""

    def __init__(self) -> None:
        self.quotes = QuoteIndex(_quotes)
        self.plain_prompts = QuoteIndex(_whole)  # plain text prompts with their answers
        self._by_key: LeavesByName[bytes] = LeavesByName()
        self._by_tool_call: LeavesByName[str] = LeavesByName()

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, leaf: Leaf) -> None:
        """Add an answer under its names and texts."""
        if leaf.is_extended:
            leaf.fingerprints = leaf.fingerprints.without_arguments()
        self._by_key.add_all(_keys(leaf), leaf)
        self._by_tool_call.add_all(filter(is_distinctive_id, leaf.tool_call_ids), leaf)
        for quote in leaf.fingerprints.quotes:
            self.quotes.add(quote, leaf)
        if leaf.fingerprints.whole:
            self.plain_prompts.add(leaf.fingerprints.whole, leaf)

    def forget_arguments(self, leaf: Leaf) -> None:
        """Remove the arguments of an answer's tool calls from it: they have their results, and nothing quotes them."""
        rest = leaf.fingerprints.without_arguments()
        for quote in leaf.fingerprints.arguments:
            self.quotes.remove(quote, leaf, rest.content)
        leaf.fingerprints = rest

    def remove(self, leaf: Leaf) -> None:
        """Remove an answer."""
        for key in _keys(leaf):
            self._by_key.remove(key, leaf)
        for name in filter(is_distinctive_id, leaf.tool_call_ids):
            self._by_tool_call.remove(name, leaf)
        for quote in leaf.fingerprints.quotes:
            self.quotes.remove(quote, leaf)
        if leaf.fingerprints.whole:
            self.plain_prompts.remove(leaf.fingerprints.whole, leaf)

    def leaves_at(self, key: str) -> Collection[Leaf]:
        """Return the leaves of a link key: of a path, of a path without its last message, or of an answer alone."""
        return self._by_key.leaves_of(short_key(key))

    def leaves_with_tool_call(self, tool_call_id: str) -> Collection[Leaf]:
        """Return the leaves whose tool call has this id; none if the id is not distinctive."""
        return self._by_tool_call.leaves_of(tool_call_id)


def size_of(leaf: Leaf) -> int:
    """Return the estimated bytes of one answer."""
    fingerprints = leaf.fingerprints
    size = _LEAF_BYTES + _ID_BYTES * len(leaf.tool_call_ids)
    for quote in fingerprints.quotes:
        size += _QUOTE_BYTES + _PREFIX_BYTES * len(quote.prefix_hashes)
    whole = fingerprints.whole
    return size + (_QUOTE_BYTES + _PREFIX_BYTES * len(whole.prefix_hashes) if whole else 0)


def _quotes(leaf: Leaf) -> tuple[QuotedText, ...]:
    return leaf.fingerprints.quotes


def _whole(leaf: Leaf) -> tuple[QuotedText, ...]:
    return (leaf.fingerprints.whole,) if leaf.fingerprints.whole else ()


def _keys(leaf: Leaf) -> list[bytes]:
    fingerprints = leaf.fingerprints
    return [key for key in (leaf.link_key, fingerprints.skip_last_key, fingerprints.answer_key) if key]
