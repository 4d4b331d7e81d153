"""Puts the ids that were sampled earlier in place of the re-rendered ones. Pure; no I/O.

A chat template writes a conversation anew at every call: it drops reasoning, re-serialises tool calls, strips
whitespace. The new prompt then no longer begins with what the engine saw and sampled. Here both are cut into turns
at the id that ends one, and compared turn by turn: what was sent must be the same, what was sampled may differ.

Promises: the result begins with the held ids, id for id, and goes on with the render's own ids for what is new. Any
doubt is a `ContextFork`, with its reason; the render is then used as it is. Whether the client edited our answer is not
seen here: linking has compared the words before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ratchet.store.records import unpack_ids

GENERATION_PROMPT = 16  # ids at the end of a prompt that open the answer; a template may write them otherwise later

Span = tuple[int, int]  # [start, end) of sampled ids


class ContextFork(Exception):
    """The held ids cannot be continued for sure; the reason is one of a few words, for a metric."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Context(msgspec.Struct, frozen=True):
    """Everything up to and with an answer: `ids` as packed int32, and which of them were sampled, in order."""

    ids: bytes
    spans: tuple[Span, ...]

    def followed(self, new: bytes, sampled: bytes) -> Context:
        """Return the context of an answer: this one, then what was sent anew, then what was sampled."""
        start = (len(self.ids) + len(new)) // 4
        return Context(self.ids + new + sampled, (*self.spans, (start, start + len(sampled) // 4)))


EMPTY_CONTEXT = Context(b"", ())


@dataclass(slots=True, frozen=True)
class Spliced:
    """A prompt that begins with held ids; `tail` is what is new in it."""

    ids: list[int]
    tail: list[int]


def splice(held: Context, rendered: Sequence[int], turn_end: int) -> Spliced | None:
    """Return the held ids and what is new in `rendered`; None where `rendered` begins with them anyway. Raises
    ContextFork.

    An answer that was cut off gets the missing `turn_end`: context, never sampled.
    """
    ids = list(unpack_ids(held.ids))
    if len(rendered) > len(ids) and list(rendered[: len(ids)]) == ids:
        return None
    if ids[-1] != turn_end:
        ids.append(turn_end)
    ours, theirs = _ends(ids, turn_end), _ends(rendered, turn_end)
    if len(theirs) < len(ours):
        raise ContextFork("turns_gone")
    begin, begin_new = 0, 0
    for end, end_new in zip(ours, theirs, strict=False):
        spans = [span for span in held.spans if span[0] < end and span[1] > begin]
        _compare(ids[begin:end], rendered[begin_new:end_new], [(a - begin, b - begin) for a, b in spans])
        begin, begin_new = end, end_new
    if begin_new == len(rendered):
        raise ContextFork("nothing_new")
    tail = list(rendered[begin_new:])
    return Spliced(ids + tail, tail)


def tail_after_change(rendered: Sequence[int], changed: Sequence[int], turn_end: int) -> list[int] | None:
    """Return what follows the last answer, found by a second render in which its words are others.

    The two renders end alike from the answer's last turn end at the latest. None where they say nothing.
    """
    common = _common_suffix(rendered, changed)
    if common == len(rendered):
        return None
    suffix = list(rendered[len(rendered) - common :])
    return suffix[suffix.index(turn_end) + 1 :] if turn_end in suffix else None


def first_after_change(rendered: Sequence[int], changed: Sequence[int]) -> int | None:
    """Return the id that follows the changed words: the end of their turn. None where the words are not rendered."""
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
    """Raise Fork where a turn differs in what was sent. `spans`: what was sampled of it, relative to its begin."""
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
