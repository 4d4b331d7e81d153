"""Which trajectory a new conversation belongs to: by answers or tool-call ids that its prompt quotes.

A summary call quotes the conversation, and the call after it quotes the summary. A sub-agent's task is an argument of
its parent's tool call. An agent that writes its history into one text quotes all of it. A quote is a whole answer or a
whole argument, verbatim or as a JSON string, after the start of a line, a colon, a bracket or a quotation mark.

All quotes of a prompt must come from one trajectory: a judge's prompt, which quotes several, belongs to none of them.
An assistant message that starts with a known answer and goes on (a closing tag that a stop string had cut off) counts
as that answer only if the path before it matches, as other trajectories may contain the same text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ratchet.proxy.coordinator.linking.fuzzy_match import LeafFilter, choose_leaf, shared_trajectories
from ratchet.proxy.coordinator.linking.leaf_index import LeafIndex
from ratchet.proxy.coordinator.linking.quote_index import WorkLimit, WorkLimitExceeded
from ratchet.proxy.messages.link_records import Leaf
from ratchet.proxy.messages.text_fingerprints import MIN_QUOTE_LENGTH, PROMPT, short_key
from ratchet.store.content import messages as canon

_MAX_TEXT = 150_000  # characters that are searched, of the latest messages
_ID_PREFIXES = ("chatcmpl-tool-", "call_", "toolu_")
_ID_END = re.compile(r"[A-Za-z0-9]{9,}")

BY_PATH, BY_IDS, BY_QUOTE = "graph", "tool_ids", "quote"
_CONTINUING_ROLES = ("assistant", PROMPT)  # a quote in one of these continues the answer

Text = tuple[int, str, str]  # the message's position, its role, its text


def find_quoted_leaf(
    leaves: LeafIndex, messages: Sequence[dict[str, Any]], keys: Sequence[str], fits: LeafFilter
) -> tuple[Leaf | None, bool, str]:
    """Return the leaf that is quoted last, whether the quote continues it, and how it was found.

    `keys` are the link keys of the messages.
    """
    texts = _texts(messages)
    if texts and texts[-1][1] == PROMPT and (leaf := _plain_prompt_leaf(leaves, texts[-1][2], fits)):
        return leaf, True, BY_PATH
    named = [
        (texts[number][1], leaf) for number, leaf in _leaves_by_ids(leaves, [one[2] for one in texts]) if fits(leaf)
    ]
    if len({leaf.trajectory_id for _, leaf in named}) == 1:
        role, leaf = named[-1]
        return leaf, role in _CONTINUING_ROLES, BY_IDS
    if not leaves.quotes:
        return None, False, ""
    try:
        groups, last_role = _quoted_groups(leaves, texts, keys, fits)
    except WorkLimitExceeded:
        return None, False, ""
    return _leaf_of_one_trajectory(groups), last_role in _CONTINUING_ROLES, BY_QUOTE


def quotes_any(leaves: LeafIndex, messages: Sequence[dict[str, Any]], fits: LeafFilter) -> bool:
    """Return whether the messages quote any known answer or tool-call id, or may do so: the search has a limit."""
    texts = [text for _, _, text in _texts(messages)]
    if any(fits(leaf) for _, leaf in _leaves_by_ids(leaves, texts)):
        return True
    try:
        found = leaves.quotes.find_quotes(texts, WorkLimit())
        return any(fits(leaf) for _, _, quotes in found for quote in quotes.values() for leaf in quote.leaves)
    except WorkLimitExceeded:
        return True


def _plain_prompt_leaf(leaves: LeafIndex, text: str, fits: LeafFilter) -> Leaf | None:
    """Return the leaf with the longest plain prompt and answer that the text starts with."""
    try:
        found = leaves.plain_prompts.quotes_at(text, 0, WorkLimit())
    except WorkLimitExceeded:
        return None
    for quote in reversed(found.values()):  # the longest comes last
        if equal := [leaf for leaf in quote.leaves if fits(leaf)]:
            return choose_leaf(equal)
    return None


def _quoted_groups(
    leaves: LeafIndex, texts: Sequence[Text], keys: Sequence[str], fits: LeafFilter
) -> tuple[dict[bytes, dict[Leaf, None]], str]:
    """Return the leaves of each quote by its digest, in the order of the texts, and the role of the last quoting text.

    Raises WorkLimitExceeded.
    """
    groups: dict[bytes, dict[Leaf, None]] = {}
    last_role, work = "", WorkLimit()
    candidates: dict[bytes, list[Leaf]] = {}  # by digest: a quote may occur many times
    for number, at, quotes in leaves.quotes.find_quotes([text for _, _, text in texts], work):
        position, role, text = texts[number]
        for digest in quotes:
            if digest not in candidates:
                candidates[digest] = [leaf for leaf in quotes[digest].leaves if fits(leaf)]
        found = {digest: candidates[digest] for digest in quotes}
        if role == "assistant" and not at:
            before = keys[position - 1] if position else canon.ROOT
            found = {digest: _answers_after(found[digest], before, text[: quotes[digest].length]) for digest in quotes}
        known = [digest for digest in quotes if found[digest]]
        if len(known) > 1:
            known.sort(key=lambda one: _order(found[one], one))
        for digest in known:
            group = groups.setdefault(digest, {})
            if len(group) < len(candidates[digest]):
                group.update(dict.fromkeys(found[digest]))
            last_role = role
    return groups, last_role


def _order(found: Sequence[Leaf], digest: bytes) -> tuple[float, int]:
    """Return the sort key of quotes at one place: oldest first."""
    digests = [quote.digest for quote in found[0].fingerprints.quotes]
    return found[0].created_at, digests.index(digest)


def _answers_after(found: Sequence[Leaf], before: str, text: str) -> list[Leaf]:
    """Return the leaves with this answer directly after the path whose link key is `before`."""
    key = short_key(canon.link_key(before, {"role": "assistant", "content": text}))
    return [leaf for leaf in found if leaf.link_key == key]


def _leaf_of_one_trajectory(groups: Mapping[bytes, Collection[Leaf]]) -> Leaf | None:
    trajectories = shared_trajectories(groups.values())
    if not trajectories:
        return None
    return choose_leaf(leaf for leaf in list(groups.values())[-1] if leaf.trajectory_id in trajectories)


def _texts(messages: Sequence[dict[str, Any]]) -> list[Text]:
    """Return (position, role, text) of the messages long enough to quote; the last ones if there is too much text."""
    found: list[Text] = []
    left = _MAX_TEXT
    for position in range(len(messages) - 1, -1, -1):
        message = messages[position]
        text = canon.visible_content(message)
        if isinstance(text, str) and len(text) >= MIN_QUOTE_LENGTH and left > 0:
            found.append((position, str(message.get("role")), text[:left]))
            left -= len(text)
    return found[::-1]


def _leaves_by_ids(leaves: LeafIndex, texts: Sequence[str]) -> Iterator[tuple[int, Leaf]]:
    """Yield the leaves whose tool calls' ids stand in texts, in their order there, each with the number of the text."""
    joined = "\n".join(texts)  # one search of all is faster than one of each
    prefixes = [prefix for prefix in _ID_PREFIXES if prefix in joined]
    for number, text in enumerate(texts if prefixes else ()):
        found: list[tuple[int, str]] = []
        for prefix in prefixes:
            at = text.find(prefix)
            while at >= 0:
                end = _ID_END.match(text, at + len(prefix))
                if end:
                    found.append((at, prefix + end[0]))
                at = text.find(prefix, end.end() if end else at + len(prefix))
        for _, tool_call_id in sorted(found):
            for leaf in leaves.leaves_with_tool_call(tool_call_id):
                yield number, leaf
