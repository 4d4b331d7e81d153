"""The answers of one key to one alias that may be continued, indexed by everything that a later prompt may repeat.

Each index holds one key's answers to one alias: a call never searches another key's traffic.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from ratchet.proxy.coordinator.linking.quote_index import LeavesByName, QuoteIndex
from ratchet.proxy.messages.link_records import AnswerDetails, Leaf
from ratchet.proxy.messages.text_fingerprints import (
    QuotedText,
    TextFingerprints,
    is_distinctive_id,
    prefix_hash,
    short_key,
)

# Estimates in bytes, entries in the tables included; a test measures them.
TRAJECTORY_BYTES = 650  # of a trajectory without its answers
_LEAF_BYTES = 480  # of an answer with the names that every answer has
_ID_BYTES = 120  # of a tool call's id
_QUOTE_BYTES = 220
_PREFIX_BYTES = 80
_STOPPED_BYTES = 150  # of a stopped answer besides its text


class LeafIndex:
    """Leaves by link key, by tool call and by quoted text. All kinds of link keys share one table: none are equal."""

    def __init__(self) -> None:
        self.quotes = QuoteIndex(_quotes)
        self.plain_prompts = QuoteIndex(_whole)  # plain text prompts with their answers
        self.stopped: LeavesByName[bytes] = LeavesByName()  # stopped answers, by short link key of the path before
        self._by_key: LeavesByName[bytes] = LeavesByName()
        self._by_tool_call: LeavesByName[int] = LeavesByName()  # by hash of the id, which takes less memory

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, leaf: Leaf) -> int:
        """Add an answer under its names and texts; return the estimated bytes that it takes."""
        details = leaf.details
        if leaf.is_extended:
            details = _forget_arguments(leaf, details)
        fingerprints = details.fingerprints
        self._by_key.add_all(_keys(leaf, fingerprints), leaf)
        self._by_tool_call.add_all(map(prefix_hash, filter(is_distinctive_id, details.tool_call_ids)), leaf)
        for quote in fingerprints.quotes:
            self.quotes.add(quote, leaf)
        if fingerprints.whole:
            self.plain_prompts.add(fingerprints.whole, leaf)
        if details.stopped:
            self.stopped.add(details.stopped.before, leaf)
        return _size_of(details)

    def forget_arguments(self, leaf: Leaf) -> int:
        """Remove the arguments of an answer's tool calls from it: they have their results, and nothing quotes them.

        Return how many bytes less it takes.
        """
        details = leaf.details
        for quote in details.fingerprints.arguments:
            self.quotes.remove(quote, leaf, details.fingerprints.content)
        _forget_arguments(leaf, details)
        return sum(map(_quote_size, details.fingerprints.arguments))

    def remove(self, leaf: Leaf) -> int:
        """Remove an answer; return how many bytes it took."""
        details = leaf.details
        fingerprints = details.fingerprints
        for key in _keys(leaf, fingerprints):
            self._by_key.remove(key, leaf)
        for name in filter(is_distinctive_id, details.tool_call_ids):
            self._by_tool_call.remove(prefix_hash(name), leaf)
        for quote in fingerprints.quotes:
            self.quotes.remove(quote, leaf)
        if fingerprints.whole:
            self.plain_prompts.remove(fingerprints.whole, leaf)
        if details.stopped:
            self.stopped.remove(details.stopped.before, leaf)
        return _size_of(details)

    def leaves_at(self, key: str) -> Collection[Leaf]:
        """Return the leaves of a link key: of a path, of a path without its last message, or of an answer alone."""
        return self._by_key.leaves_of(short_key(key))

    def leaves_with_tool_call(self, tool_call_id: str) -> Collection[Leaf]:
        """Return the leaves whose tool call has this id; none if the id is not distinctive."""
        return self._by_tool_call.leaves_of(prefix_hash(tool_call_id))


def _size_of(details: AnswerDetails) -> int:
    fingerprints = details.fingerprints
    quotes = fingerprints.quotes if fingerprints.whole is None else (*fingerprints.quotes, fingerprints.whole)
    stopped = _STOPPED_BYTES + len(details.stopped.text) if details.stopped else 0
    return _LEAF_BYTES + _ID_BYTES * len(details.tool_call_ids) + sum(map(_quote_size, quotes)) + stopped


def _quote_size(quote: QuotedText) -> int:
    return _QUOTE_BYTES + _PREFIX_BYTES * len(quote.prefix_hashes)


def _forget_arguments(leaf: Leaf, details: AnswerDetails) -> AnswerDetails:
    """Pack an answer's details without arguments; return them."""
    if details.fingerprints.arguments:
        details = msgspec.structs.replace(details, fingerprints=details.fingerprints.without_arguments())
        leaf.details = details
    return details


def _quotes(leaf: Leaf) -> tuple[QuotedText, ...]:
    return leaf.fingerprints.quotes


def _whole(leaf: Leaf) -> tuple[QuotedText, ...]:
    whole = leaf.fingerprints.whole
    return (whole,) if whole else ()


def _keys(leaf: Leaf, fingerprints: TextFingerprints) -> list[bytes]:
    return [key for key in (leaf.link_key, fingerprints.skip_last_key, fingerprints.answer_key) if key]
