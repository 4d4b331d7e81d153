"""Which contexts the proof of a swap asks about: where trained tokens were sampled, spread over rows. Pure.

Promises: no context twice, since attempts at the same task begin alike and would count as evidence twice; of few short
rows, other places of the same rows fill up what is wanted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ratchet.trainer.rows.token_row import TokenRow

ROWS = 12
_CONTEXTS = 48
_MOST_TOKENS = 512  # of a context: what it costs to ask


def contexts(rows: Sequence[TokenRow]) -> list[tuple[int, ...]]:
    """Return the ids before the tokens that are asked for; by turns of each row, sampled places first."""
    each = -(-_CONTEXTS // max(1, len(rows)))
    waiting: list[Iterator[tuple[int, ...]]] = [_of_row(row, each) for row in rows]
    found: dict[tuple[int, ...], None] = {}
    while waiting and len(found) < _CONTEXTS:
        for row in list(waiting):
            fresh = next((context for context in row if context not in found), None)
            if fresh is None:
                waiting.remove(row)
            elif len(found) < _CONTEXTS:
                found[fresh] = None
    return list(found)


def _of_row(row: TokenRow, spread: int) -> Iterator[tuple[int, ...]]:
    places = range(1, min(len(row.ids), _MOST_TOKENS))
    sampled = [place for place in places if row.mask[place]]
    even = dict.fromkeys(sampled[len(sampled) * part // spread] for part in range(spread) if sampled)
    for place in dict.fromkeys((*even, *sampled, *reversed(places))):
        yield tuple(row.ids[:place])
