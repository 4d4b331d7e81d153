"""Rebuilds whole token sequences from calls, which store only their new tokens. Pure.

A sequence is int32 little-endian bytes, as in the records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ratchet.store.records import Call


class TokenCall(NamedTuple):
    """What a sequence is made of: a call's `prompt_ids`, and the token ids of its choices by index."""

    id: str
    parent_call: str | None
    parent_choice: int
    context: str
    prompt_ids: bytes
    choices: Mapping[int, bytes]


def token_call(call: Call) -> TokenCall:
    """Return a call's part of the sequences."""
    choices = {choice.index: choice.token_ids for choice in call.choices}
    return TokenCall(call.id, call.parent_call, call.parent_choice, call.context, call.prompt_ids, choices)


def sequences(calls: Iterable[TokenCall]) -> dict[tuple[str, int], bytes]:
    """Return, per (call id, choice index), the token ids of the context and the answer.

    `calls`: ordered by `parents_first`. An `exact` call whose parent is not among them is left out: its context is
    unknown.
    """
    whole: dict[tuple[str, int], bytes] = {}
    for call in calls:
        prompt = call.prompt_ids
        if call.context == "exact":
            before = whole.get((call.parent_call or "", call.parent_choice))
            if before is None:
                continue
            prompt = before + prompt
        for index, token_ids in call.choices.items():
            whole[call.id, index] = prompt + token_ids
    return whole


def sampled_spans(calls: Iterable[Call], answer: tuple[str, int]) -> tuple[tuple[int, int], ...]:
    """Return the sampled spans [start, end) of an answer's sequence, in order; `answer` as in `sequences`."""
    known = {call.id: call for call in calls}
    chain: list[tuple[Call, bytes]] = []
    name, index = answer
    while name in known:
        call = known[name]
        chain.append((call, next((choice.token_ids for choice in call.choices if choice.index == index), b"")))
        if call.context != "exact":
            break
        name, index = call.parent_call or "", call.parent_choice
    spans, length = [], 0
    for call, ids in reversed(chain):
        start = length + len(call.prompt_ids) // 4
        length = start + len(ids) // 4
        spans.append((start, length))
    return tuple(spans)
