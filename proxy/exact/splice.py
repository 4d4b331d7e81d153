"""Replaces re-rendered ids by the ids that were sampled earlier. Pure; no I/O.

A chat template writes the conversation again for every call: it drops reasoning, re-serialises tool calls, strips
whitespace. The new prompt then no longer begins with what the engine read and sampled. Here both prompts are cut into
turns at the id that ends one, and compared turn by turn: sent tokens must be equal, sampled tokens may differ.

Promises: the result begins with the recorded ids, id for id, and continues with the render's own ids. Any doubt raises
`ContextFork` with a reason; the render is then used as it is. Edits of our answers by the client are not detected here:
linking has compared the texts before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ratchet.store.records import unpack_ids

GENERATION_PROMPT = 16  # ids at a prompt's end that open the completion; a template may render them differently later

Span = tuple[int, int]  # [start, end) of sampled ids


class ContextFork(Exception):
    """The recorded ids cannot be continued safely; `reason` is a metric label."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Context(msgspec.Struct, frozen=True):
    """All tokens up to the end of a completion: `ids` as packed int32, and the spans that were sampled, in order."""

    ids: bytes
    spans: tuple[Span, ...]

    def followed(self, new: bytes, sampled: bytes) -> Context:
        """Return this context extended by new prompt ids and sampled ids."""
        start = (len(self.ids) + len(new)) // 4
        return Context(self.ids + new + sampled, (*self.spans, (start, start + len(sampled) // 4)))


EMPTY_CONTEXT = Context(b"", ())


@dataclass(slots=True, frozen=True)
class Spliced:
    """A prompt that begins with recorded ids; `tail` is the new part."""

    ids: list[int]
    tail: list[int]


def splice(context: Context, rendered: Sequence[int], turn_end: int) -> Spliced | None:
    """Return the recorded ids plus the new part of `rendered`; None if `rendered` begins with them already.

    A completion that was cut off gets the missing `turn_end`, which does not count as sampled. Raises ContextFork.
    """
    ids = list(unpack_ids(context.ids))
    if len(rendered) > len(ids) and list(rendered[: len(ids)]) == ids:
        return None
    if ids[-1] != turn_end:
        ids.append(turn_end)
    ours, theirs = _ends(ids, turn_end), _ends(rendered, turn_end)
    if len(theirs) < len(ours):
        raise ContextFork("turns_gone")
    begin, begin_new = 0, 0
    for end, end_new in zip(ours, theirs, strict=False):
        spans = [span for span in context.spans if span[0] < end and span[1] > begin]
        _compare(ids[begin:end], rendered[begin_new:end_new], [(a - begin, b - begin) for a, b in spans])
        begin, begin_new = end, end_new
    if begin_new == len(rendered):
        raise ContextFork("nothing_new")
    tail = list(rendered[begin_new:])
    return Spliced(ids + tail, tail)


def tail_after_change(rendered: Sequence[int], changed: Sequence[int], turn_end: int) -> list[int] | None:
    """Return the ids after the last assistant message, found by a second render with other words in it.

    Both renders are equal from the end of that message's turn on. None if they do not show it.
    """
    common = _common_suffix(rendered, changed)
    if common == len(rendered):
        return None
    suffix = list(rendered[len(rendered) - common :])
    return suffix[suffix.index(turn_end) + 1 :] if turn_end in suffix else None


def first_after_change(rendered: Sequence[int], changed: Sequence[int]) -> int | None:
    """Return the id after the changed words: the end of their turn. None if the words are not rendered."""
    common = _common_suffix(rendered, changed)
    return rendered[len(rendered) - common] if 0 < common < len(rendered) else None


def _common_suffix(one: Sequence[int], other: Sequence[int]) -> int:
    count = 0
    for a, b in zip(reversed(one), reversed(other), strict=False):
        if a != b:
            break
        count += 1
    return count


def _ends(ids: Sequence[int], turn_end: int) -> list[int]:
    return [place + 1 for place, token in enumerate(ids) if token == turn_end]


def _compare(turn: Sequence[int], new: Sequence[int], spans: Sequence[Span]) -> None:
    """Raise ContextFork if a turn differs from what was sent. `spans`: its sampled parts, relative to its start."""
    if not spans:
        if list(turn) != list(new):
            raise ContextFork("history_edited")
        return
    (begin, end), *more = spans
    if more or begin < 0 or end > len(turn) or end < len(turn) - 1:
        raise ContextFork("turn_end_inside_answer")
    same = next((place for place, (a, b) in enumerate(zip(turn, new, strict=False)) if a != b), len(new))
    if same < begin - GENERATION_PROMPT:
        raise ContextFork("history_edited")
