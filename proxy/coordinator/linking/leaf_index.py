"""The answers of one key to one alias that may be continued, by everything that a later prompt may know them by.

Nothing of another key or alias is among them, so that no call looks through another key's traffic.
"""

from __future__ import annotations

from collections.abc import Collection

from ratchet.proxy.coordinator.linking.leaves_by_name import LeavesByName
from ratchet.proxy.coordinator.linking.quote_index import QuoteIndex
from ratchet.proxy.messages.link_records import Leaf
from ratchet.proxy.messages.text_fingerprints import is_distinctive


class LeafIndex:
    """Leaves by name and by their words. All names share one index, since none can be another's."""

    def __init__(self) -> None:
        self.quotes = QuoteIndex()
        self.wholes = QuoteIndex()  # plain prompts with their answers
        self._by: LeavesByName[str] = LeavesByName()

    def __len__(self) -> int:
        return len(self._by)

    def add(self, leaf: Leaf) -> None:
        """Remember an answer under its names and words."""
        self._by.add_all(_names(leaf), leaf)
        for quote in leaf.fingerprints.quotes:
            self.quotes.add(quote, leaf)
        if leaf.fingerprints.whole:
            self.wholes.add(leaf.fingerprints.whole, leaf)

    def drop(self, leaf: Leaf) -> None:
        """Forget an answer."""
        for name in _names(leaf):
            self._by.drop(name, leaf)
        for quote in leaf.fingerprints.quotes:
            self.quotes.drop(quote, leaf)
        if leaf.fingerprints.whole:
            self.wholes.drop(leaf.fingerprints.whole, leaf)

    def at(self, key: str) -> Collection[Leaf]:
        """Return the leaves of a link key: of a path, of a path but for its last message, or of an answer alone."""
        return self._by.at(key)

    def calling(self, tool_call_id: str) -> Collection[Leaf]:
        """Return the leaves that gave a tool call this id; none where the id tells nothing."""
        return self._by.at("id " + tool_call_id)


def _names(leaf: Leaf) -> list[str]:
    seen = leaf.fingerprints
    names = [name for name in (leaf.link_key, seen.skip_last_key, seen.answer_key) if name]
    if leaf.tool_call_ids:
        names += ["id " + name for name in leaf.tool_call_ids if is_distinctive(name)]
    return names
