"""Selects the contexts that the proof of a swap compares: places of trained tokens, spread over rows. Pure.

No context occurs twice, because rollouts of a task share prefixes. If rows are few and short, other places of the same
rows fill the number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ratchet.trainer.rows.token_row import TokenRow

ROWS = 12
_CONTEXTS = 48
_MAX_TOKENS = 512  # of a context, to limit its cost


def contexts(rows: Sequence[TokenRow]) -> list[tuple[int, ...]]:
    """Return the ids before the compared tokens, taking rows in turn, sampled places first."""
    each = -(-_CONTEXTS // max(1, len(rows)))
    iterators: list[Iterator[tuple[int, ...]]] = [_of_row(row, each) for row in rows]
    selected: dict[tuple[int, ...], None] = {}
    while iterators and len(selected) < _CONTEXTS:
        for row in list(iterators):
            fresh = next((context for context in row if context not in selected), None)
            if fresh is None:
                iterators.remove(row)
            elif len(selected) < _CONTEXTS:
                selected[fresh] = None
    return list(selected)


def _of_row(row: TokenRow, spread: int) -> Iterator[tuple[int, ...]]:
    places = range(1, min(len(row.ids), _MAX_TOKENS))
    sampled = [place for place in places if row.mask[place]]
    even = dict.fromkeys(sampled[len(sampled) * part // spread] for part in range(spread) if sampled)
    for place in dict.fromkeys((*even, *sampled, *reversed(places))):
        yield tuple(row.ids[:place])
