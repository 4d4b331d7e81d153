"""Finds known texts within a prompt: each position is tested once, and each length there is hashed once.

A quote starts at the beginning of a text, or after a boundary character and the white space that follows it. One pass
of a regular expression skips positions that cannot start any known text, by the character classes of its first
characters. Texts with the same beginning are distinguished by the hashes of their first 64, 256, 1,024 ... characters.
Holds hashes, apart from the first characters of each text. No I/O.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterable, Iterator
from functools import lru_cache
from hashlib import blake2b
from json import JSONDecodeError, JSONDecoder
from typing import Generic, TypeVar

from ratchet.proxy.messages.link_records import Leaf
from ratchet.proxy.messages.text_fingerprints import ANCHOR_LENGTH, DIGEST_BYTES, PREFIX_LENGTHS, QuotedText

Quotes = dict[bytes, int]  # digest -> length of the texts that start at one position

_BOUNDARIES = ("\n", ": ", '"', ">", "`", "(", "[")
_BLANK = re.compile(r"\s*")
_SHORT = 200  # characters; in a shorter text a search per boundary is faster
_SEARCHED = 60_000  # characters; to compile a new pattern costs about as much as searching them without one
_PATTERN_LENGTH = 8  # characters of an anchor in the pattern
_CLASSES = {"a-z": "az", "A-Z": "AZ", "0-9": "09", "\x80-\U0010ffff": "\x80\U0010ffff"}
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
        self._anchors: dict[str, int] = {}  # number of texts with this beginning
        self._prefixes: dict[int, int] = {}  # number of texts by the hash of a prefix
        self._lengths: dict[int | str, dict[int, int]] = {}  # by the last prefix hash or the anchor: texts by length
        self._classes: tuple[set[str], ...] = tuple(set() for _ in range(_PATTERN_LENGTH))  # of the anchors' characters
        self._pattern: re.Pattern[str] | None = None
        self._searched = 0  # characters since there is no pattern

    def __len__(self) -> int:
        return len(self._leaves)

    def leaves_with(self, digest: bytes) -> Collection[Leaf]:
        """Return the leaves with this text, oldest first."""
        return self._leaves.leaves_of(digest)

    def add(self, quote: QuotedText, leaf: Leaf) -> None:
        """Add a text of a leaf."""
        if not self._leaves.add(quote.digest, leaf):
            return
        if quote.anchor not in self._anchors:
            self._widen(quote.anchor)
        _increment(self._anchors, quote.anchor)
        for prefix in quote.prefix_hashes:
            _increment(self._prefixes, prefix)
        _increment(self._lengths.setdefault(_node(quote), {}), quote.length)

    def remove(self, quote: QuotedText, leaf: Leaf) -> None:
        """Remove a text of a leaf."""
        if not self._leaves.remove(quote.digest, leaf):
            return
        _decrement(self._anchors, quote.anchor)
        for prefix in quote.prefix_hashes:
            _decrement(self._prefixes, prefix)
        node = _node(quote)
        _decrement(self._lengths[node], quote.length)
        if not self._lengths[node]:
            del self._lengths[node]

    def find_quotes(self, text: str, work: WorkLimit) -> Iterator[tuple[int, Quotes]]:
        """Yield each position of a text where known texts start, and which. Raises WorkLimitExceeded."""
        for at in self._positions(text):
            found = self.quotes_at(text, at, work)
            if text[at - 1 : at] == '"' and (within := _unquoted(text, at, work)) is not None:
                found |= self.quotes_at(within, 0, work)
            if found:
                yield at, found

    def quotes_at(self, text: str, at: int, work: WorkLimit) -> Quotes:
        """Return the known texts that start at one position, shortest first. Raises WorkLimitExceeded."""
        found: Quotes = {}
        hashed, upto, known = blake2b(digest_size=DIGEST_BYTES), at, self._leaves.names
        for node in self._nodes(text, at):
            lengths = sorted([length for length in self._lengths.get(node, ()) if at + length <= len(text)])
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

    def _nodes(self, text: str, at: int) -> Iterator[int | str]:
        """Yield the nodes whose texts may start at a position, as long as known prefixes match the text."""
        anchor = text[at : at + ANCHOR_LENGTH]
        if anchor not in self._anchors:
            return
        yield anchor
        for step in PREFIX_LENGTHS:
            if at + step > len(text) or (prefix := hash(text[at : at + step])) not in self._prefixes:
                return
            yield prefix

    def _positions(self, text: str) -> list[int]:
        """Return the positions where a known anchor starts, in order."""
        anchors = self._anchors
        if len(text) < _SHORT or (self._pattern is None and not self._is_pattern_due(text)):
            return sorted({at for at in _starts(text) if text[at : at + ANCHOR_LENGTH] in anchors})
        found = [0] if text[:ANCHOR_LENGTH] in anchors else []
        pattern = self._compiled()
        if not anchors.keys().isdisjoint(pattern.findall(text)):  # rare; a test is cheaper than the loop
            found += [one.end() for one in pattern.finditer(text) if one[1] in anchors]
        return found

    def _widen(self, anchor: str) -> None:
        """Extend the pattern to this anchor."""
        for classes, letter in zip(self._classes, anchor, strict=False):
            if (name := _class(letter)) not in classes:
                classes.add(name)
                self._pattern, self._searched = None, 0

    def _is_pattern_due(self, text: str) -> bool:
        """Return whether so much was searched without a pattern that one is worth its compilation."""
        self._searched += len(text)
        return self._searched > _SEARCHED

    def _compiled(self) -> re.Pattern[str]:
        """Return the pattern of a boundary followed by what may be an anchor.

        It also matches white space that no anchor follows, so that none is searched twice.
        """
        if self._pattern is None:
            starts = "".join(f"[{''.join(sorted(classes))}]" for classes in self._classes)
            boundaries = "|".join(map(re.escape, _BOUNDARIES))
            self._pattern = re.compile(
                rf"(?:{boundaries})\s*+(?:(?=({starts}.{{{ANCHOR_LENGTH - _PATTERN_LENGTH}}}))|(?<=\s))", re.DOTALL
            )
        return self._pattern


def _starts(text: str) -> Iterator[int]:
    """Yield where a quote may start: at the beginning, and after a boundary and its white space."""
    yield 0  # texts have no leading white space
    last = len(text) - ANCHOR_LENGTH
    for boundary in _BOUNDARIES:
        start, at = 0, text.find(boundary)
        while at >= 0 and (start := _BLANK.match(text, at + len(boundary)).end()) <= last:  # type: ignore[union-attr]
            yield start
            at = text.find(boundary, start)


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


@lru_cache(512)
def _class(letter: str) -> str:
    """Return the character class of a character, as written in a set of a regular expression."""
    return next((name for name, ends in _CLASSES.items() if ends[0] <= letter <= ends[1]), re.escape(letter))


def _node(quote: QuotedText) -> int | str:
    return quote.prefix_hashes[-1] if quote.prefix_hashes else quote.anchor


def _increment(counts: dict[_T, int], name: _T) -> None:
    counts[name] = counts.get(name, 0) + 1


def _decrement(counts: dict[_T, int], name: _T) -> None:
    counts[name] -= 1
    if not counts[name]:
        del counts[name]
