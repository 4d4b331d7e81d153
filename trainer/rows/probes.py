"""Selects the contexts that the proof of a swap compares: before sampled tokens, spread over trajectories. Pure.

Rows are taken in an order that spreads over the round, and each gives a few contexts that are far apart: the deepest
one's cost covers the others, because vLLM's prefix cache and the learner's shared prefixes compute a prefix once. No
context occurs twice, because rollouts of a task share prefixes. If sampled places are few, places of the prompts fill
the number.
"""

from __future__ import annotations

from collections.abc import Sequence

from ratchet.trainer.rows.token_row import TokenRow

ROWS = 12  # that suffice
_CONTEXTS = 24
_MAX_TOKENS = 32_768  # of the deepest contexts of all rows together


def contexts(rows: Sequence[TokenRow]) -> list[tuple[int, ...]]:
    """Return the ids before the compared tokens: of many rows a few each, of few long ones more."""
    lengths = sum(len(row.ids) for row in rows)
    affordable = max(1, min(len(rows), _CONTEXTS, _MAX_TOKENS * len(rows) // max(1, lengths)))
    selected: dict[tuple[int, ...], None] = {}
    left = _MAX_TOKENS
    for sampled in (True, False):
        for row in _spread(rows):
            places = [place for place in range(1, len(row.ids)) if row.mask[place] or not sampled]
            wanted = -(-_CONTEXTS // affordable) if sampled else _CONTEXTS - len(selected)
            fresh = [context for place in _even(places, wanted) if (context := row.ids[:place]) not in selected]
            fresh = [context for context in fresh if len(context) <= left][: _CONTEXTS - len(selected)]
            left -= max(map(len, fresh), default=0)
            selected |= dict.fromkeys(fresh)
    return list(selected)


def _spread(rows: Sequence[TokenRow]) -> list[TokenRow]:
    """Return the rows so that any first part of them is spread over all."""
    order: dict[int, None] = {}
    step = max(1, len(rows))
    while len(order) < len(rows):
        order |= dict.fromkeys(range(0, len(rows), step))
        step = max(1, step // 2)
    return [rows[index] for index in order]


def _even(places: Sequence[int], most: int) -> list[int]:
    """Return at most `most` of the places, evenly spread."""
    return [places[len(places) * part // most] for part in range(most)] if len(places) > most else list(places)
