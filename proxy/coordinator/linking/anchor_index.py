"""Finds the positions of a prompt at which the beginning of a known text stands.

A quote starts at the beginning of a text, or after a boundary character and the white space that follows it. Long
prompts are searched by array operations over all their characters: a position is looked at only if a boundary or white
space precedes it, if some text begins with its character, and if a table has a bit for the hash of its first ones. What
remains is compared exactly. No I/O.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ratchet.proxy.messages.text_fingerprints import ANCHOR_LENGTH

_BOUNDARIES = ("\n", ": ", '"', ">", "`", "(", "[")
_NEAR = 64  # characters before a position that are searched for white space at once
_BLANK = re.compile(r"\s*")
_SHORT = 6_000  # characters; below, a search for each boundary is faster than arrays
_HASHED = 8  # characters of an anchor in one hash; it has two, as in a Bloom filter
_FACTORS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F))  # of multiplicative hashing (Knuth, 6.4)
_BLOCK = 32_768  # characters in one array operation; larger arrays cost page faults
_SPARSITY = 16  # bits of the table for each anchor
_SMALLEST = 1_024  # bits of the table
_BITS = np.array([1 << place for place in range(8)], np.uint8)
_BYTE, _BIT = np.uint64(3), np.uint64(7)  # how a hash is divided
_BLANKS = {ord(one) for one in map(chr, range(0x3001)) if one.isspace()}
_BEFORE = {ord(one[-1]) for one in _BOUNDARIES} | _BLANKS


def _bytes_table(codes: set[int]) -> bytes:
    """Return what `bytes.translate` needs to mark these bytes."""
    return bytes([code in codes for code in range(256)])


_BEFORE_ASCII = _bytes_table({code for code in _BEFORE if code < 0x80})
_BEFORE_ANY = _bytes_table({code & 0xFF for code in _BEFORE})  # by the low bytes of characters


class AnchorIndex:
    """The first `ANCHOR_LENGTH` characters of known texts: those names in two mappings that are strings."""

    def __init__(self, known: Mapping[str, object], more: Mapping[str | int, object]) -> None:
        self._known, self._more = known, more
        self._table = np.zeros(_SMALLEST // 8, np.uint8)  # bit by hash: whether an anchor may have these characters
        self._unhashed: list[str] = []  # anchors that are not in the table yet
        self._hashed = 0  # anchors in the table, with those removed since it was made
        self._firsts = bytearray(256)  # by low byte of a character: whether an anchor in the table begins with it

    def add(self, anchor: str) -> None:
        """Note that a mapping gets a new beginning."""
        self._unhashed.append(anchor)
        if len(self._unhashed) == _SMALLEST:  # nobody searches
            self._update_table()

    def find(self, texts: Sequence[str]) -> Iterator[tuple[int, int]]:
        """Yield where anchors stand: the index of the text and the position in it, in order."""
        known, more = self._known, self._more
        if sum(map(len, texts)) < _SHORT:
            for number, text in enumerate(texts):
                places = {
                    at for at in _starts(text) if (here := text[at : at + ANCHOR_LENGTH]) in known or here in more
                }
                for at in sorted(places):
                    yield number, at
            return
        joined = "\n" + "\n".join(texts)
        number, begin, end = -1, 0, 0
        ends = accumulate(len(text) + 1 for text in texts)  # of each text in `joined`
        for place in self._candidates(joined):
            here = joined[place : place + ANCHOR_LENGTH]
            if here not in known and here not in more:
                continue
            while place >= end:
                begin, end, number = end + 1, next(ends), number + 1
            if place + ANCHOR_LENGTH <= end and _is_start(joined, place, begin):
                yield number, place - begin

    def _candidates(self, text: str) -> list[int]:
        """Return the positions of a text that may start an anchor, in order."""
        self._update_table()
        characters = _low_bytes(text)
        before = np.frombuffer(characters.translate(_BEFORE_ASCII if text.isascii() else _BEFORE_ANY), np.bool_)
        firsts = np.frombuffer(characters.translate(self._firsts), np.bool_)
        windows: NDArray[np.uint64] = np.ndarray((len(characters) - _HASHED + 1,), "<u8", characters, strides=(1,))
        last = len(text) - ANCHOR_LENGTH
        found: list[int] = []
        for begin in range(0, last, _BLOCK):
            end = min(begin + _BLOCK, last)
            places = np.flatnonzero(before[begin:end] & firsts[begin + 1 : end + 1]) + (begin + 1)
            for skipped, factor in enumerate(_FACTORS):
                hashes = self._hashes(windows[places + skipped * _HASHED], factor)
                places = places[(self._table[hashes >> _BYTE] & _BITS[hashes & _BIT]) != 0]
            found += places.tolist()
        return found

    def _update_table(self) -> None:
        """Enter new anchors; make a table of another size if there are many, or if many in it were removed."""
        if not self._unhashed:
            return
        if (self._hashed + len(self._unhashed)) * _SPARSITY > 8 * len(self._table):
            known = {*self._known, *(name for name in self._more if isinstance(name, str))}
            size = max(_SMALLEST, 1 << (2 * _SPARSITY * len(known) - 1).bit_length())
            self._table, self._unhashed, self._hashed = np.zeros(size // 8, np.uint8), list(known), 0
            self._firsts = bytearray(256)
        for skipped, factor in enumerate(_FACTORS):
            part = slice(skipped * _HASHED, (skipped + 1) * _HASHED)
            beginnings = _low_bytes("".join(anchor[part] for anchor in self._unhashed))
            hashes = self._hashes(np.frombuffer(beginnings, "<u8"), factor)
            np.bitwise_or.at(self._table, hashes >> _BYTE, _BITS[hashes & _BIT])
        for first in _low_bytes("".join({anchor[0] for anchor in self._unhashed})):
            self._firsts[first] = True
        self._hashed += len(self._unhashed)
        self._unhashed.clear()

    def _hashes(self, parts: NDArray[np.uint64], factor: np.uint64) -> NDArray[np.uint64]:
        bits = (8 * len(self._table)).bit_length() - 1
        return (parts * factor) >> np.uint64(64 - bits)


def _low_bytes(text: str) -> bytes:
    """Return the low byte of each character."""
    return text.encode() if text.isascii() else text.encode("utf-32-le", "surrogatepass")[::4]


def _starts(text: str) -> Iterator[int]:
    """Yield where a quote may start: at the beginning, and after a boundary and its white space."""
    yield 0  # texts have no leading white space
    last = len(text) - ANCHOR_LENGTH
    for boundary in _BOUNDARIES:
        start, at = 0, text.find(boundary)
        while at >= 0 and (start := _BLANK.match(text, at + len(boundary)).end()) <= last:  # type: ignore[union-attr]
            yield start
            at = text.find(boundary, start)


def _is_start(text: str, at: int, begin: int) -> bool:
    """Return whether a quote may start at a position of the text that begins at `begin`. It is no white space."""
    near = max(begin, at - _NEAR)
    blank = near + len(text[near:at].rstrip())
    while blank > begin and text[blank - 1].isspace():
        blank -= 1
    if at == begin or "\n" in text[blank:at]:
        return True
    return text[blank - 1] in '">`([' or (text[blank - 1] == ":" and text[blank : blank + 1] == " ")
