"""Which run a new conversation was begun for: by words or tool-call ids of ours that its prompt quotes.

A summary call quotes the conversation, the call after it quotes the summary; a sub-agent's task is an argument of its
parent's tool call; an agent that writes its history into one text quotes all of it. Quoted are whole answers and whole
arguments, as they were or as a JSON string, after a line's beginning, a colon, a bracket or a quotation mark.
All quotes of a prompt must be of one run: a judge's prompt, which quotes several, belongs to none of them.
A message of the assistant that begins with an answer of ours and goes on (a closing tag that a stop string had cut off)
is that answer only where all that stands before it is what led to the answer: other runs say the same words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from json import JSONDecodeError, JSONDecoder
from typing import Any

from proxy.linking.leaf import Leaf
from proxy.linking.leaves import Leaves
from proxy.linking.likeness import Fits, choose, shared_runs
from proxy.linking.traces import ANCHOR, LEAST, PROMPT, Quote, digest
from store import messages as canon

_BOUNDS = ("\n", ": ", '"', ">", "`", "(", "[")
_MOST_TEXT = 150_000  # characters that are looked at, of the latest messages
_ID = re.compile(r"(?:chatcmpl-tool-|call_|toolu_)[A-Za-z0-9]{9,}")
_BLANK = re.compile(r"\s*")
_json = JSONDecoder(strict=False)

BY_PATH, BY_IDS, BY_QUOTE = "graph", "tool_ids", "quote"


def quoted(
    leaves: Leaves, messages: Sequence[dict[str, Any]], keys: Sequence[str], fits: Fits
) -> tuple[Leaf | None, bool, str]:
    """Return the leaf whose words or ids are quoted last, whether an assistant's message quotes it, and how.

    `keys` are the link keys of the messages.
    """
    texts = _texts(messages)
    if texts and texts[-1][1] == PROMPT and (leaf := _begun_with(leaves, texts[-1][2], fits)):
        return leaf, True, BY_PATH
    named = [(role, leaf) for _, role, text in texts for leaf in _named(leaves, text) if fits(leaf)]
    if len({leaf.trajectory_id for _, leaf in named}) == 1:
        role, leaf = named[-1]
        return leaf, role in _CONTINUED, BY_IDS
    if not leaves.can_be_quoted:
        return None, False, ""
    groups: dict[bytes, list[Leaf]] = {}
    last = ""
    for place, role, text in texts:
        before = keys[place - 1] if place else canon.ROOT
        for leaf, quote, at in _said(leaves, text):
            if role == "assistant" and not at and not _is_answer(leaf, before, text[: quote.length]):
                continue
            if fits(leaf) and not (quote.pending and leaf.extended):
                groups.setdefault(quote.digest, []).append(leaf)
                last = role
    return _of_one_run(groups), last in _CONTINUED, BY_QUOTE


_CONTINUED = ("assistant", PROMPT)  # who quotes us there goes on from what we said


def _begun_with(leaves: Leaves, text: str, fits: Fits) -> Leaf | None:
    """Return the leaf whose plain prompt and answer the text begins with: the longest that does."""
    by_length: dict[int, list[tuple[Leaf, bytes]]] = {}
    for leaf in leaves.beginning(text[:ANCHOR]):
        if leaf.traces.whole and fits(leaf):
            by_length.setdefault(leaf.traces.whole.length, []).append((leaf, leaf.traces.whole.digest))
    for length in sorted(by_length, reverse=True):
        begun = digest(text[:length]) if length <= len(text) else b""
        if same := [leaf for leaf, whole in by_length[length] if whole == begun]:
            return choose(same)
    return None


def _of_one_run(groups: dict[bytes, list[Leaf]]) -> Leaf | None:
    runs = shared_runs(groups.values())
    if not runs:
        return None
    return choose(leaf for leaf in list(groups.values())[-1] if leaf.trajectory_id in runs)


def _is_answer(leaf: Leaf, before: str, words: str) -> bool:
    """Return whether the words after the path named `before` are the leaf's answer."""
    return canon.link_key(before, {"role": "assistant", "content": words}) == leaf.link_key


def _texts(messages: Sequence[dict[str, Any]]) -> list[tuple[int, str, str]]:
    """Return (place, role, text) of the messages that can quote, the last ones where there is too much."""
    found: list[tuple[int, str, str]] = []
    left = _MOST_TEXT
    for place in range(len(messages) - 1, -1, -1):
        message = messages[place]
        text = canon.spoken(message)
        if isinstance(text, str) and len(text) >= LEAST and left > 0:
            found.append((place, str(message.get("role")), text[:left]))
            left -= len(text)
    return found[::-1]


def _named(leaves: Leaves, text: str) -> Iterator[Leaf]:
    if "-tool-" in text or ("_" in text and ("call_" in text or "toolu_" in text)):  # seldom, and quickly told
        for found in _ID.finditer(text):
            yield from leaves.calling(found[0])


def _said(leaves: Leaves, text: str) -> Iterator[tuple[Leaf, Quote, int]]:
    """Yield the leaves whose words begin at a bound of the text and go on there to their end, and where."""
    for at in sorted(set(_places(text))):
        anchor = text[at : at + ANCHOR]
        for leaf in leaves.saying(anchor):
            for quote in leaf.traces.quotes:
                if quote.anchor == anchor and _stands(quote, text, at):
                    yield leaf, quote, at


def _places(text: str) -> Iterator[int]:
    """Yield where words may begin: at the beginning, and behind a bound and the white space that follows it."""
    yield 0  # no text begins with white space
    last = len(text) - ANCHOR
    for bound in _BOUNDS:
        start, at = 0, text.find(bound)
        while at >= 0 and (start := _BLANK.match(text, at + len(bound)).end()) <= last:  # type: ignore[union-attr]
            yield start
            at = text.find(bound, start)


def _stands(quote: Quote, text: str, at: int) -> bool:
    if digest(text[at : at + quote.length]) == quote.digest:
        return True
    if text[at - 1 : at] != '"':
        return False
    try:
        within, _ = _json.raw_decode(text, at - 1)
    except JSONDecodeError:
        return False
    return digest(str(within).strip()[: quote.length]) == quote.digest
