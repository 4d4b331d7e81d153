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
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ratchet.proxy.coordinator.linking.fuzzy_match import LeafFilter, choose, shared_trajectories
from ratchet.proxy.coordinator.linking.leaf_index import LeafIndex
from ratchet.proxy.coordinator.linking.quote_index import WorkLimit, WorkLimitExceeded
from ratchet.proxy.messages.link_records import Leaf
from ratchet.proxy.messages.text_fingerprints import LEAST, PROMPT
from ratchet.store.content import messages as canon

_MOST_TEXT = 150_000  # characters that are looked at, of the latest messages
_ID = re.compile(r"(?:chatcmpl-tool-|call_|toolu_)[A-Za-z0-9]{9,}")

BY_PATH, BY_IDS, BY_QUOTE = "graph", "tool_ids", "quote"
_CONTINUED = ("assistant", PROMPT)  # who quotes us there goes on from what we said

Text = tuple[int, str, str]  # the message's place, its role, what it says


def quoted(
    leaves: LeafIndex, messages: Sequence[dict[str, Any]], keys: Sequence[str], fits: LeafFilter
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
    if not leaves.quotes:
        return None, False, ""
    try:
        groups, last = _groups(leaves, texts, keys, fits)
    except WorkLimitExceeded:
        return None, False, ""
    return _of_one_trajectory(groups), last in _CONTINUED, BY_QUOTE


def _begun_with(leaves: LeafIndex, text: str, fits: LeafFilter) -> Leaf | None:
    """Return the leaf whose plain prompt and answer the text begins with: the longest that does."""
    try:
        found = leaves.wholes.standing_at(text, 0, WorkLimit())
    except WorkLimitExceeded:
        return None
    for digest in reversed(found):  # the longest is found last
        if same := [leaf for leaf in leaves.wholes.saying(digest) if fits(leaf)]:
            return choose(same)
    return None


def _groups(
    leaves: LeafIndex, texts: Sequence[Text], keys: Sequence[str], fits: LeafFilter
) -> tuple[dict[bytes, dict[Leaf, None]], str]:
    """Return who said what is quoted, by its digest in the order of the texts, and the role of the last text that does.

    Raises WorkLimitExceeded.
    """
    groups: dict[bytes, dict[Leaf, None]] = {}
    last, work = "", WorkLimit()
    fitting: dict[bytes, list[Leaf]] = {}  # the same words may stand at many places
    for place, role, text in texts:
        for at, standing in leaves.quotes.standing(text, work):
            for digest in standing.keys() - fitting.keys():
                fitting[digest] = [one for one in leaves.quotes.saying(digest) if fits(one) and _may(one, digest)]
            found = {digest: fitting[digest] for digest in standing}
            if role == "assistant" and not at:
                before = keys[place - 1] if place else canon.ROOT
                found = {digest: _answers(found[digest], before, text[: standing[digest]]) for digest in standing}
            for digest in sorted((one for one in found if found[one]), key=lambda one: _order(found[one], one)):
                group = groups.setdefault(digest, {})
                if len(group) < len(fitting[digest]):
                    group.update(dict.fromkeys(found[digest]))
                last = role
    return groups, last


def _may(leaf: Leaf, digest: bytes) -> bool:
    """Return whether words of a leaf may be quoted: those of a call that has its result may not."""
    return not leaf.is_extended or any(
        quote.digest == digest and not quote.pending for quote in leaf.fingerprints.quotes
    )


def _order(found: Sequence[Leaf], digest: bytes) -> tuple[float, int]:
    """Return what sorts words that stand at one place: those that were said first come first."""
    words = [quote.digest for quote in found[0].fingerprints.quotes]
    return found[0].created_at, words.index(digest)


def _answers(found: Sequence[Leaf], before: str, words: str) -> list[Leaf]:
    """Return the leaves whose answer these words are after the path named `before`."""
    key = canon.link_key(before, {"role": "assistant", "content": words})
    return [leaf for leaf in found if leaf.link_key == key]


def _of_one_trajectory(groups: Mapping[bytes, Collection[Leaf]]) -> Leaf | None:
    runs = shared_trajectories(groups.values())
    if not runs:
        return None
    return choose(leaf for leaf in list(groups.values())[-1] if leaf.trajectory_id in runs)


def _texts(messages: Sequence[dict[str, Any]]) -> list[Text]:
    """Return (place, role, text) of the messages that can quote, the last ones where there is too much."""
    found: list[Text] = []
    left = _MOST_TEXT
    for place in range(len(messages) - 1, -1, -1):
        message = messages[place]
        text = canon.spoken(message)
        if isinstance(text, str) and len(text) >= LEAST and left > 0:
            found.append((place, str(message.get("role")), text[:left]))
            left -= len(text)
    return found[::-1]


def _named(leaves: LeafIndex, text: str) -> Iterator[Leaf]:
    if "-tool-" in text or ("_" in text and ("call_" in text or "toolu_" in text)):  # seldom, and quickly told
        for found in _ID.finditer(text):
            yield from leaves.calling(found[0])
