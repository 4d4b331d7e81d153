"""Kendall's tau-b over the pairs of several groups.

scipy.stats.kendalltau compares all pairs of two samples. Here only members of the same group are comparable, so the
pairs of each group are pooled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import combinations


def kendall_tau_b(pairs: Iterable[tuple[float, float]]) -> float | None:
    """Return tau-b of pairs of differences (in one score, in the other); None if either score ties every pair."""
    concordance = first = second = 0
    for a, b in pairs:
        concordance += (a * b > 0) - (a * b < 0)
        first += a != 0
        second += b != 0
    return concordance / math.sqrt(first * second) if first and second else None


def score_differences(one: Mapping[str, float], other: Mapping[str, float]) -> list[tuple[float, float]]:
    """Return the differences in both scores for each pair of ids that both scored."""
    shared = sorted(set(one) & set(other))
    return [(one[a] - one[b], other[a] - other[b]) for a, b in combinations(shared, 2)]
