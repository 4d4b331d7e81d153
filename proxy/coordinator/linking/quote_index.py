"""Finds known texts within a prompt: each position is tested once, and each length there is hashed once.

`anchor_index.py` says where the beginning of a known text stands. Texts with the same beginning are distinguished by
the hashes of their first 64, 256, 1,024 ... characters. Holds hashes, apart from the first characters of each text.
No I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from hashlib import blake2b
from json import JSONDecodeError, JSONDecoder
from typing import Any, Generic, NamedTuple, TypeVar

from ratchet.proxy.coordinator.linking.anchor_index import AnchorIndex
from ratchet.proxy.messages.link_records import Leaf
from ratchet.proxy.messages.text_fingerprints import (
    ANCHOR_LENGTH,
    DIGEST_BYTES,
    PREFIX_LENGTHS,
    QuotedText,
    prefix_hash,
)


class Quote(NamedTuple):
    """A known text that starts at one position."""

    length: int
    leaves: Collection[Leaf]  # oldest first


Quotes = dict[bytes, Quote]  # by digest

_json = JSONDecoder(strict=False)

_MAX_EQUAL = 4_096  # leaves under one name
_FEW = 4  # leaves of a node whose texts are not indexed further

_T = TypeVar("_T")
Name = TypeVar("Name")


class WorkLimitExceeded(Exception):
    """The text repeats the beginning of known texts so often that a full search would take too long."""


class WorkLimit:
    """The remaining budget of a search. A unit is a matching beginning, a length there, or 1,024 characters."""

    __slots__ = ("_left",)

    def __init__(self, limit: int = 8_000) -> None:
        self._left = limit

    def spend(self, amount: int) -> None:
        """Subtract from the budget. Raises WorkLimitExceeded."""
        self._left -= amount
        if self._left < 0:
            raise WorkLimitExceeded


class LeavesByName(Generic[Name]):
    """Leaves by any kind of name, oldest first. Bounded: a name keeps its latest `_MAX_EQUAL` leaves."""

    __slots__ = ("_leaves",)

    def __init__(self) -> None:
        self._leaves: dict[
            Name, Leaf | dict[Leaf, None]
        ] = {}  # a single leaf is stored without a dict, as most names have one

    def __len__(self) -> int:
        return len(self._leaves)

    def leaves_of(self, name: Name) -> Collection[Leaf]:
        """Return the leaves of a name."""
        found = self._leaves.get(name, ())
        return (found,) if isinstance(found, Leaf) else found

    def add(self, name: Name, leaf: Leaf) -> bool:
        """Add a leaf under a name; return whether it is the first."""
        found = self._leaves.get(name)
        if found is None:
            self._leaves[name] = leaf
            return True
        if isinstance(found, Leaf):
            if found is leaf:
                return False
            found = self._leaves[name] = {found: None}
        found[leaf] = None
        if len(found) > _MAX_EQUAL:
            del found[next(iter(found))]
        return False

    def add_all(self, names: Iterable[Name], leaf: Leaf) -> None:
        """Add a leaf under several names."""
        known = self._leaves
        for name in names:
            if known.setdefault(name, leaf) is not leaf:
                self.add(name, leaf)

    def remove(self, name: Name, leaf: Leaf) -> bool:
        """Remove a leaf under a name; return whether it was the last."""
        found = self._leaves.get(name)
        if isinstance(found, dict):
            found.pop(leaf, None)
        if found is leaf or found == {}:
            del self._leaves[name]
            return True
        return False


class _ManyTexts:
    """The texts that end at one node, of many leaves."""

    __slots__ = ("leaves", "lengths")

    def __init__(self) -> None:
        self.leaves: LeavesByName[bytes] = LeavesByName()  # by digest
        self.lengths: dict[int, int] = {}  # number of texts by length

    def add(self, text: QuotedText, leaf: Leaf) -> None:
        """Add a text of a leaf."""
        if self.leaves.add(text.digest, leaf):
            _increment(self.lengths, text.length)

    def remove(self, text: QuotedText, leaf: Leaf) -> None:
        """Remove a text of a leaf."""
        if self.leaves.remove(text.digest, leaf):
            _decrement(self.lengths, text.length)


_Texts = Leaf | tuple[Leaf, ...] | _ManyTexts  # that end at one node: of one leaf, of a few, which know them, of many


class QuoteIndex:
    """Leaves by those of their texts that `texts_of` returns.

    A text ends at the node of its last prefix hash; if it has none, at that of its anchor. Most nodes have one leaf.
    """

    def __init__(self, texts_of: Callable[[Leaf], Iterable[QuotedText]]) -> None:
        self._texts_of = texts_of
        self._by_anchor: dict[str, _Texts] = {}  # short texts
        self._by_prefix: dict[int, _Texts] = {}  # by the last prefix hash
        self._longer: dict[str | int, int] = {}  # by anchor and prefix hash: number of nodes of longer texts
        self._anchors = AnchorIndex(self._by_anchor, self._longer)

    def __bool__(self) -> bool:
        return bool(self._by_anchor or self._by_prefix)

    def add(self, text: QuotedText, leaf: Leaf) -> None:
        """Add a text of a leaf."""
        nodes, node = self._place_of(text)
        held = nodes.get(node)
        if held is None:
            if text.anchor not in self._longer and not (text.prefix_hashes and text.anchor in self._by_anchor):
                self._anchors.add(text.anchor)
            nodes[node] = leaf
            for shorter in _shorter_nodes(text):
                _increment(self._longer, shorter)
        elif isinstance(held, _ManyTexts):
            held.add(text, leaf)
        elif leaf not in (few := _few(held)):
            few = (*few, leaf)
            nodes[node] = few if len(few) <= _FEW else self._many(few, node)

    def remove(self, text: QuotedText, leaf: Leaf, kept: QuotedText | None = None) -> None:
        """Remove a text of a leaf that keeps another one, which may be the same."""
        nodes, node = self._place_of(text)
        held = nodes.get(node)
        if isinstance(held, _ManyTexts):
            if kept is None or kept.digest != text.digest:
                held.remove(text, leaf)
            if held.leaves:
                return
        elif held is None or leaf not in (few := _few(held)) or (kept is not None and _node(kept) == node):
            return
        elif len(few) > 1:
            rest = tuple([other for other in few if other is not leaf])
            nodes[node] = rest if len(rest) > 1 else rest[0]
            return
        del nodes[node]
        for shorter in _shorter_nodes(text):
            _decrement(self._longer, shorter)

    def find_quotes(self, texts: Sequence[str], work: WorkLimit) -> Iterator[tuple[int, int, Quotes]]:
        """Yield the number of the text, the position in it, and which known texts start there, in order.

        Raises WorkLimitExceeded.
        """
        for number, at in self._anchors.find(texts):
            text = texts[number]
            found = self.quotes_at(text, at, work)
            if text[at - 1 : at] == '"' and (within := _unquoted(text, at, work)) is not None:
                found |= self.quotes_at(within, 0, work)
            if found:
                yield number, at, found

    def quotes_at(self, text: str, at: int, work: WorkLimit) -> Quotes:
        """Return the known texts that start at one position, shortest first. Raises WorkLimitExceeded."""
        found: Quotes = {}
        hashed, upto = blake2b(digest_size=DIGEST_BYTES), at
        for node, held in self._nodes(text, at):
            many = held if isinstance(held, _ManyTexts) else self._many(_few(held), node)
            lengths = sorted([length for length in many.lengths if at + length <= len(text)])
            if not lengths:
                work.spend(1)
                continue
            work.spend(1 + len(lengths) + (lengths[-1] >> 10))
            for length in lengths:
                hashed.update(text[upto : at + length].encode("utf-8", "surrogatepass"))
                upto = at + length
                if leaves := many.leaves.leaves_of(digest := hashed.digest()):
                    found[digest] = Quote(length, leaves)
        return found

    def _many(self, leaves: Iterable[Leaf], node: str | int) -> _ManyTexts:
        """Return the texts of these leaves that end at a node."""
        many = _ManyTexts()
        for leaf in leaves:
            for text in self._texts_of(leaf):
                if _node(text) == node:
                    many.add(text, leaf)
        return many

    def _place_of(self, text: QuotedText) -> tuple[dict[Any, _Texts], str | int]:
        return (self._by_prefix if text.prefix_hashes else self._by_anchor), _node(text)

    def _nodes(self, text: str, at: int) -> Iterator[tuple[str | int, _Texts | None]]:
        """Yield the nodes whose texts may start at a position, as long as known prefixes match the text."""
        anchor = text[at : at + ANCHOR_LENGTH]
        held = self._by_anchor.get(anchor)
        if held is None and anchor not in self._longer:
            return
        yield anchor, held
        for step in PREFIX_LENGTHS:
            if at + step > len(text):
                return
            prefix = prefix_hash(text[at : at + step])
            held = self._by_prefix.get(prefix)
            if held is None and prefix not in self._longer:
                return
            yield prefix, held


def _unquoted(text: str, at: int, work: WorkLimit) -> str | None:
    """Return the value of the JSON string that starts there, if its anchor equals the text's."""
    work.spend(1)
    try:
        within, end = _json.raw_decode(text, at - 1)
    except JSONDecodeError:
        work.spend((len(text) - at) >> 10)
        return None
    work.spend((end - at) >> 10)
    stripped = str(within).strip()
    return stripped if stripped.startswith(text[at : at + ANCHOR_LENGTH]) else None


def _node(text: QuotedText) -> str | int:
    return text.prefix_hashes[-1] if text.prefix_hashes else text.anchor


def _shorter_nodes(text: QuotedText) -> tuple[str | int, ...]:
    return (text.anchor, *text.prefix_hashes[:-1]) if text.prefix_hashes else ()


def _few(held: Leaf | tuple[Leaf, ...] | None) -> tuple[Leaf, ...]:
    return held if isinstance(held, tuple) else () if held is None else (held,)


def _increment(counts: dict[_T, int], name: _T) -> None:
    counts[name] = counts.get(name, 0) + 1


def _decrement(counts: dict[_T, int], name: _T) -> None:
    counts[name] -= 1
    if not counts[name]:
        del counts[name]
