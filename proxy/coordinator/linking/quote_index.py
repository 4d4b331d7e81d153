"""Finds known texts within a prompt: each position is tested once, and each length there is hashed once.

`anchor_index.py` says where the beginning of a known text stands. Texts with the same beginning are distinguished by
the hashes of their first 64, 256, 1,024 ... characters. Holds hashes, apart from the first characters of each text.
No I/O.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from hashlib import blake2b
from json import JSONDecodeError, JSONDecoder
from typing import Generic, TypeVar

from ratchet.proxy.coordinator.linking.anchor_index import AnchorIndex
from ratchet.proxy.messages.link_records import Leaf
from ratchet.proxy.messages.text_fingerprints import (
    ANCHOR_LENGTH,
    DIGEST_BYTES,
    PREFIX_LENGTHS,
    QuotedText,
    prefix_hash,
)

Quotes = dict[bytes, int]  # digest -> length of the texts that start at one position

_json = JSONDecoder(strict=False)

_MAX_EQUAL = 4_096  # leaves under one name

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

    def __init__(self) -> None:
        self._leaves: dict[
            Name, Leaf | dict[Leaf, None]
        ] = {}  # a single leaf is stored without a dict, as most names have one

    def __len__(self) -> int:
        return len(self._leaves)

    @property
    def names(self) -> Container[Name]:
        """All names."""
        return self._leaves

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


class QuoteIndex:
    """Leaves by the texts of their answers and arguments."""

    def __init__(self) -> None:
        self._leaves: LeavesByName[bytes] = LeavesByName()  # by digest
        self._anchors = AnchorIndex()
        self._prefixes: dict[int, int] = {}  # number of texts by the hash of a prefix
        # By the last prefix hash or the anchor: number of texts by length, or the length of the only text.
        self._lengths: dict[int | str, dict[int, int] | int] = {}

    def __len__(self) -> int:
        return len(self._leaves)

    def leaves_with(self, digest: bytes) -> Collection[Leaf]:
        """Return the leaves with this text, oldest first."""
        return self._leaves.leaves_of(digest)

    def add(self, quote: QuotedText, leaf: Leaf) -> None:
        """Add a text of a leaf."""
        if not self._leaves.add(quote.digest, leaf):
            return
        self._anchors.add(quote.anchor)
        for prefix in quote.prefix_hashes:
            _increment(self._prefixes, prefix)
        node = _node(quote)
        lengths = self._lengths.get(node)
        if lengths is None:
            self._lengths[node] = quote.length
            return
        if isinstance(lengths, int):
            lengths = self._lengths[node] = {lengths: 1}
        _increment(lengths, quote.length)

    def remove(self, quote: QuotedText, leaf: Leaf) -> None:
        """Remove a text of a leaf."""
        if not self._leaves.remove(quote.digest, leaf):
            return
        self._anchors.remove(quote.anchor)
        for prefix in quote.prefix_hashes:
            _decrement(self._prefixes, prefix)
        node = _node(quote)
        lengths = self._lengths[node]
        if isinstance(lengths, dict):
            _decrement(lengths, quote.length)
        if isinstance(lengths, int) or not lengths:
            del self._lengths[node]

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
        hashed, upto, known = blake2b(digest_size=DIGEST_BYTES), at, self._leaves.names
        for node in self._nodes(text, at):
            lengths = sorted([length for length in self._lengths_of(node) if at + length <= len(text)])
            if not lengths:
                work.spend(1)
                continue
            work.spend(1 + len(lengths) + (lengths[-1] >> 10))
            for length in lengths:
                hashed.update(text[upto : at + length].encode("utf-8", "surrogatepass"))
                upto = at + length
                if (digest := hashed.digest()) in known:
                    found[digest] = length
        return found

    def _lengths_of(self, node: int | str) -> Iterable[int]:
        lengths = self._lengths.get(node, ())
        return (lengths,) if isinstance(lengths, int) else lengths

    def _nodes(self, text: str, at: int) -> Iterator[int | str]:
        """Yield the nodes whose texts may start at a position, as long as known prefixes match the text."""
        anchor = text[at : at + ANCHOR_LENGTH]
        if anchor not in self._anchors:
            return
        yield anchor
        for step in PREFIX_LENGTHS:
            if at + step > len(text) or (prefix := prefix_hash(text[at : at + step])) not in self._prefixes:
                return
            yield prefix


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


def _node(quote: QuotedText) -> int | str:
    return quote.prefix_hashes[-1] if quote.prefix_hashes else quote.anchor


def _increment(counts: dict[_T, int], name: _T) -> None:
    counts[name] = counts.get(name, 0) + 1


def _decrement(counts: dict[_T, int], name: _T) -> None:
    counts[name] -= 1
    if not counts[name]:
        del counts[name]
