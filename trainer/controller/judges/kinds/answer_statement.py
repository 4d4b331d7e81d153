"""Decides whether a text states an answer, rather than denies it or lists it among several candidates. Pure.

The rules match words, they do not parse sentences. In doubt the answer is not stated, so that agents gain nothing from
lists, denials or hedging.
"""

from __future__ import annotations

import re

LIMITS = (
    "the rule matches words: it detects lists (Rome, Oslo; Rome or Oslo) and common English denials, but neither "
    "several statements (It is Rome. It is Oslo.) nor other denials; match: exact avoids both"
)

_SENTENCE = re.compile(r"(?<!\n\d)(?<!\n\d\d)[.!?](?=\s|$)")  # "1. Rome" is a line of a list
_CLAUSE = re.compile(rf"{_SENTENCE.pattern}|[;:\n,]|(?<!anything )\bbut\b")
_SEPARATOR = re.compile(r"[,;/|\n&]|\b(?:or|and|nor)\b")
_NOT = r"(?:is|was|are|do|does|wo|ca)n['\u2019]t"
_DENIED_BEFORE = re.compile(
    rf"\b(?:not|no|never|neither|nor|cannot|without|except|unlike|hardly|impossible|{_NOT}|instead of|rather than|"
    r"other than|anything but)\b"
)
_HARMLESS = re.compile(r"\b(?:no|without(?: a)?|not any|never any) doubt\b")
_DENIED_AFTER = re.compile(rf"^[\"'*\s]*(?:(?:is|was|would be)\s+(?:not|wrong|false|incorrect)|not|{_NOT})\b")
# A short piece that starts so is a remark, not another candidate: "Oslo, of course", "4, which is even".
_REMARK = re.compile(
    r"(?:not|of|in|on|at|by|for|from|to|with|as|i|it|we|you|he|she|they|that|this|there|which|who|where|when|because|"
    r"since|so|if|is|are|was|were|has|have|then|thus|hence|please|thanks|yes|no|sir|although|though|while|according)\b"
)
_OPENING = re.compile(
    r"(?:therefore|thus|hence|so|then|after|before|finally|consequently|altogether|overall|ok|okay|sure|yes|no|well|"
    r"actually|clearly|as|if|since|because|when|while|although|though|given|according|based|by|from|in|for|with|to|"
    r"of course|i think|i believe|\w+ing)\b|.*:$"
)
_MARKS = " \t\n\"'`*()[]{}$.!?"
_BULLET = re.compile(r"^(?:[-*\u2022]|\d+[.)])\s+|^(?:either|both|the|a|an)\s+")
_NEAR = 1000  # characters
_EXTRA_WORDS = 1  # of another candidate


def is_stated(text: str, start: int, end: int) -> bool:
    """Return whether a folded text states its piece from `start` to `end`, judged by the text around it."""
    begin = max(0, start - _NEAR)
    text, start, end = text[begin : end + _NEAR], start - begin, end - begin
    return not _is_denied(text, start, end) and not _is_listed("\n" + text, start + 1, end + 1)


def _is_denied(text: str, start: int, end: int) -> bool:
    begin = max((match.end() for match in _CLAUSE.finditer(text, 0, start)), default=0)
    before = _HARMLESS.sub(" ", text[begin:start])
    return _DENIED_BEFORE.search(before) is not None or _DENIED_AFTER.match(text[end:]) is not None


def _is_listed(text: str, start: int, end: int) -> bool:
    """Return whether the sentence has another candidate beside the piece."""
    begin = max((match.end() for match in _SENTENCE.finditer(text, 0, start)), default=0)
    stop = next((match.start() for match in _SENTENCE.finditer(text, end)), len(text))
    size = len(text[start:end].split())
    after = _SEPARATOR.split(text[end:stop])
    if len(after) > 1 and not _words(after[0]):
        following = next((piece for piece in after[1:] if _words(piece)), "")
        if _is_candidate(following, size):
            return True
    before, between = _SEPARATOR.split(text[begin:start]), _SEPARATOR.findall(text[begin:start])
    if _words(before[-1]) or _words(after[0]):
        return False  # the piece is part of a clause
    known = [(piece, mark) for piece, mark in zip(before[:-1], between, strict=True) if _words(piece)]
    return bool(known) and (_is_beside(*known[-1], size) or any(_is_candidate(piece, size) for piece, _ in known))


def _is_beside(piece: str, mark: str, size: int) -> bool:
    """Return whether the piece before the answer is another candidate rather than an opening."""
    if mark == "\n":
        return _is_candidate(piece, size)
    return mark not in ",;" or not _OPENING.match(" ".join(piece.split()))


def _is_candidate(piece: str, size: int) -> bool:
    words = _words(piece)
    phrase = " ".join(words)
    return bool(words) and len(words) <= size + _EXTRA_WORDS and not (_REMARK.match(phrase) or _OPENING.match(phrase))


def _words(piece: str) -> list[str]:
    return _BULLET.sub("", piece.lstrip()).strip(_MARKS).split()
