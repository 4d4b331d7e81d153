"""Whitening: advantages with mean 0 and variance 1 over all trained tokens of a round, as REINFORCE++ wants them.

Pure, from rows to rows. Promises that a round whose advantages are all equal gets zeros, which the learner then refuses
as a round without signal, and never noise blown up to size 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.statistics.score_spread import MIN_SCORE_SPREAD


def whiten(rows: Sequence[TokenRow]) -> list[TokenRow]:
    """Return the rows with whitened advantages: every trained token counts once."""
    weighted = [pair for row in rows for pair in _advantages(row)]
    tokens = sum(count for _, count in weighted) or 1
    mean = sum(value * count for value, count in weighted) / tokens
    std = math.sqrt(sum((value - mean) ** 2 * count for value, count in weighted) / tokens)
    scale = 1.0 / std if std > MIN_SCORE_SPREAD else 0.0
    return [_shifted(row, mean, scale) for row in rows]


def _advantages(row: TokenRow) -> list[tuple[float, int]]:
    """Return (advantage, how many trained tokens have it)."""
    if row.advantages is None:
        return [(row.advantage, row.tokens_trained)]
    return [(value, 1) for value, trained in zip(row.advantages, row.mask, strict=True) if trained]


def _shifted(row: TokenRow, mean: float, scale: float) -> TokenRow:
    each = tuple((value - mean) * scale for value in row.advantages) if row.advantages is not None else None
    return replace(row, advantage=(row.advantage - mean) * scale, advantages=each)
