"""Whitening: advantages with mean 0 and variance 1 over all trained tokens of a round, for REINFORCE++. Pure.

If all advantages are equal, they become 0, and the learner refuses the round: rounding noise is never scaled up.
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
    """Return pairs of an advantage and the number of trained tokens that have it."""
    if row.advantages is None:
        return [(row.advantage, row.tokens_trained)]
    return [(value, 1) for value, trained in zip(row.advantages, row.mask, strict=True) if trained]


def _shifted(row: TokenRow, mean: float, scale: float) -> TokenRow:
    each = tuple((value - mean) * scale for value in row.advantages) if row.advantages is not None else None
    return replace(row, advantage=(row.advantage - mean) * scale, advantages=each)
