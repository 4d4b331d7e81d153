"""Whose words a text holds: each place of it is looked at once, and each length there hashed once.

Words begin at the beginning of a text, or behind a bound and the white space that follows it. What cannot begin any of
the words, by the kinds of its first characters, one pass of a regular expression sorts out. Words that begin alike are
kept apart by their first 64, 256, 1,024 ... characters: a text is compared with those only that it goes on like.
Holds hashes, but for the first characters. No I/O.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from functools import lru_cache
from hashlib import blake2b
from json import JSONDecodeError, JSONDecoder
from typing import TypeVar

from ratchet.proxy.coordinator.linking.leaves_by_name import LeavesByName
from ratchet.proxy.messages.link_records import Leaf
from ratchet.proxy.messages.text_fingerprints import ANCHOR_LENGTH, DIGEST_BYTES, PREFIX_LENGTHS, QuotedText

Standing = dict[bytes, int]  # by digest: the length of words that stand at a place

_BOUNDS = ("\n", ": ", '"', ">", "`", "(", "[")
_BLANK = re.compile(r"\s*")
_SHORT = 6_000  # characters of a text whose bounds are quicker looked for one by one
_LOOKED_AT = 8  # characters of an anchor
_KINDS = {"a-z": "az", "A-Z": "AZ", "0-9": "09", "\x80-\U0010ffff": "\x80\U0010ffff"}
_json = JSONDecoder(strict=False)

_T = TypeVar("_T")


class WorkLimitExceeded(Exception):
    """The text repeats what our words begin with so often that nobody goes through all of it."""


class WorkLimit:
    """How much more may be looked at: places where words begin as ours do, lengths of words there, 1,024 characters."""

    __slots__ = ("_left",)

    def __init__(self, most: int = 8_000) -> None:
        self._left = most

    def take(self, amount: int) -> None:
        """Count what is looked at. Raises WorkLimitExceeded."""
        self._left -= amount
        if self._left < 0:
            raise WorkLimitExceeded


class QuoteIndex:
    """Leaves by words of theirs."""

    def __init__(self) -> None:
        self._said: LeavesByName[bytes] = LeavesByName()  # by digest
        self._anchors: dict[str, int] = {}  # how many words begin so
        self._heads: dict[int, int] = {}  # the same
        self._ends: dict[int | str, dict[int, int]] = {}  # by the last head or the anchor: how many words are so long
        self._kinds: tuple[set[str], ...] = tuple(set() for _ in range(_LOOKED_AT))  # of the anchors' characters
        self._pattern: re.Pattern[str] | None = None

    def __len__(self) -> int:
        return len(self._said)

    def saying(self, digest: bytes) -> Collection[Leaf]:
        """Return the leaves with these words, the oldest first."""
        return self._said.at(digest)

    def add(self, quote: QuotedText, leaf: Leaf) -> None:
        """Remember words of a leaf."""
        if not self._said.add(quote.digest, leaf):
            return
        if quote.anchor not in self._anchors:
            self._widen(quote.anchor)
        _more(self._anchors, quote.anchor)
        for head in quote.heads:
            _more(self._heads, head)
        _more(self._ends.setdefault(_node(quote), {}), quote.length)

    def drop(self, quote: QuotedText, leaf: Leaf) -> None:
        """Forget words of a leaf."""
        if not self._said.drop(quote.digest, leaf):
            return
        _less(self._anchors, quote.anchor)
        for head in quote.heads:
            _less(self._heads, head)
        node = _node(quote)
        _less(self._ends[node], quote.length)
        if not self._ends[node]:
            del self._ends[node]

    def standing(self, text: str, work: WorkLimit) -> Iterator[tuple[int, Standing]]:
        """Yield each place of a text where words of ours stand, and which. Raises WorkLimitExceeded."""
        for at in self._places(text):
            found = self.standing_at(text, at, work)
            if text[at - 1 : at] == '"' and (within := _unquoted(text, at, work)) is not None:
                found |= self.standing_at(within, 0, work)
            if found:
                yield at, found

    def standing_at(self, text: str, at: int, work: WorkLimit) -> Standing:
        """Return which words stand at one place. Raises WorkLimitExceeded."""
        found: Standing = {}
        hashed, upto, known = blake2b(digest_size=DIGEST_BYTES), at, self._said.names
        for node in self._nodes(text, at):
            lengths = sorted([length for length in self._ends.get(node, ()) if at + length <= len(text)])
            if not lengths:
                work.take(1)
                continue
            work.take(1 + len(lengths) + (lengths[-1] >> 10))
            for length in lengths:
                hashed.update(text[upto : at + length].encode("utf-8", "surrogatepass"))
                upto = at + length
                if (digest := hashed.digest()) in known:
                    found[digest] = length
        return found

    def _nodes(self, text: str, at: int) -> Iterator[int | str]:
        """Yield under what words may be kept that stand at a place: as far as any of ours go on like the text."""
        anchor = text[at : at + ANCHOR_LENGTH]
        if anchor not in self._anchors:
            return
        yield anchor
        for step in PREFIX_LENGTHS:
            if at + step > len(text) or (head := hash(text[at : at + step])) not in self._heads:
                return
            yield head

    def _places(self, text: str) -> list[int]:
        """Return in order where words begin as some of ours do."""
        anchors = self._anchors
        if len(text) < _SHORT:
            return sorted({at for at in _begins(text) if text[at : at + ANCHOR_LENGTH] in anchors})
        found = [0] if text[:ANCHOR_LENGTH] in anchors else []
        pattern = self._compiled()
        if not anchors.keys().isdisjoint(pattern.findall(text)):  # seldom, and quicker asked than gone through
            found += [one.end() for one in pattern.finditer(text) if one[1] in anchors]
        return found

    def _widen(self, anchor: str) -> None:
        """Let the pattern find this anchor, too."""
        for kinds, letter in zip(self._kinds, anchor, strict=False):
            if (kind := _kind(letter)) not in kinds:
                kinds.add(kind)
                self._pattern = None

    def _compiled(self) -> re.Pattern[str]:
        """Return what finds the characters that an anchor may be, behind a bound."""
        if self._pattern is None:
            begins = "".join(f"[{''.join(sorted(kinds))}]" for kinds in self._kinds)
            bounds = "|".join(map(re.escape, _BOUNDS))
            self._pattern = re.compile(rf"(?:{bounds})\s*+(?=({begins}.{{{ANCHOR_LENGTH - _LOOKED_AT}}}))", re.DOTALL)
        return self._pattern


def _begins(text: str) -> Iterator[int]:
    """Yield where words may begin: at the beginning, and behind a bound and the white space that follows it."""
    yield 0  # no text begins with white space
    last = len(text) - ANCHOR_LENGTH
    for bound in _BOUNDS:
        start, at = 0, text.find(bound)
        while at >= 0 and (start := _BLANK.match(text, at + len(bound)).end()) <= last:  # type: ignore[union-attr]
            yield start
            at = text.find(bound, start)


def _unquoted(text: str, at: int, work: WorkLimit) -> str | None:
    """Return the JSON string whose first character stands there, where it begins as the text does."""
    work.take(1)
    try:
        within, end = _json.raw_decode(text, at - 1)
    except JSONDecodeError:
        work.take((len(text) - at) >> 10)
        return None
    work.take((end - at) >> 10)
    stripped = str(within).strip()
    return stripped if stripped.startswith(text[at : at + ANCHOR_LENGTH]) else None


@lru_cache(512)
def _kind(letter: str) -> str:
    """Return the kind of a character as it is written in a set of a regular expression."""
    return next((name for name, ends in _KINDS.items() if ends[0] <= letter <= ends[1]), re.escape(letter))


def _node(quote: QuotedText) -> int | str:
    return quote.heads[-1] if quote.heads else quote.anchor


def _more(counts: dict[_T, int], name: _T) -> None:
    counts[name] = counts.get(name, 0) + 1


def _less(counts: dict[_T, int], name: _T) -> None:
    counts[name] -= 1
    if not counts[name]:
        del counts[name]
