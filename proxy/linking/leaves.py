"""The answers that may be continued, by everything that a later prompt may know them by.

Bounded: under one name the oldest are forgotten first. All names share one index, since none can be another's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from proxy.linking.leaf import Leaf
from proxy.linking.traces import is_telling

_MOST_EQUAL = 4_096


class Leaves:
    """Leaves by name; under each, the oldest first."""

    def __init__(self) -> None:
        self._by: dict[str, Leaf | dict[Leaf, None]] = {}  # one by itself: most names have no other
        self._quotable = 0

    def add(self, leaf: Leaf) -> None:
        """Remember an answer under its names."""
        self._quotable += bool(leaf.traces.quotes)
        for name in _names(leaf):
            same = self._by.setdefault(name, leaf)
            if isinstance(same, Leaf):
                if same is leaf:
                    continue
                same = self._by[name] = {same: None}
            same[leaf] = None
            if len(same) > _MOST_EQUAL:
                del same[next(iter(same))]

    def drop(self, leaf: Leaf) -> None:
        """Forget an answer."""
        self._quotable -= bool(leaf.traces.quotes)
        for name in _names(leaf):
            same = self._by.get(name)
            if isinstance(same, dict):
                same.pop(leaf, None)
            if same is leaf or same == {}:
                del self._by[name]

    def at(self, key: str) -> Collection[Leaf]:
        """Return the leaves of a link key: of a path, of a path but for its last message, or of an answer alone."""
        same = self._by.get(key, ())
        return (same,) if isinstance(same, Leaf) else same

    def calling(self, tool_call_id: str) -> Collection[Leaf]:
        """Return the leaves that gave a tool call this id; none where the id tells nothing."""
        return self.at("id " + tool_call_id)

    def saying(self, anchor: str) -> Collection[Leaf]:
        """Return the leaves that hold words beginning so."""
        return self.at("say " + anchor)

    def beginning(self, anchor: str) -> Collection[Leaf]:
        """Return the leaves whose plain prompt begins so."""
        return self.at("all " + anchor)

    @property
    def can_be_quoted(self) -> bool:
        """Whether any leaf holds words worth looking for."""
        return self._quotable > 0


def _names(leaf: Leaf) -> Iterator[str]:
    seen = leaf.traces
    yield leaf.link_key
    if seen.gap_key:
        yield seen.gap_key
    if seen.own_key:
        yield seen.own_key
    for name in leaf.tool_call_ids:
        if is_telling(name):
            yield "id " + name
    if seen.whole:
        yield "all " + seen.whole.anchor
    for anchor in {quote.anchor for quote in seen.quotes}:
        yield "say " + anchor
