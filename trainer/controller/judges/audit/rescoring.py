"""Rescoring: compares the verdicts of another judge, or another version, with earlier ones. Pure.

Trajectories with both scores count. The comparison has Kendall's tau-a over pairs within groups (concordant minus
discordant pairs, over all pairs) and the change of single scores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from ratchet.store.records import Verdict


@dataclass(frozen=True, slots=True)
class Comparison:
    """New verdicts compared with old ones. `tau` is None if all pairs are ties in both."""

    judged: int
    failures: int
    mean_before: float
    mean_after: float
    mean_change: float  # mean |after - before|
    tau: float | None
    moved: tuple[tuple[str, float, float], ...]  # (trajectory, before, after), largest change first


def compare(groups: Sequence[tuple[Mapping[str, Verdict], Sequence[Verdict]]]) -> Comparison:
    """Return the comparison over groups of (old verdicts by trajectory, new verdicts)."""
    pairs: list[tuple[str, float, float]] = []
    failures = concordant = discordant = compared = 0
    for old, new in groups:
        failures += sum(verdict.score is None for verdict in new)
        same = [
            (verdict.trajectory_id, before.score, verdict.score)
            for verdict in new
            if (before := old.get(verdict.trajectory_id)) is not None
            and before.score is not None
            and verdict.score is not None
        ]
        pairs.extend(same)
        for (_, a, b), (_, c, d) in combinations(same, 2):
            sign = math.copysign(1.0, (a - c) * (b - d)) if a != c and b != d else 0.0
            concordant += sign > 0
            discordant += sign < 0
            compared += a != c or b != d
    count = max(1, len(pairs))
    return Comparison(
        judged=len(pairs),
        failures=failures,
        mean_before=sum(before for _, before, _ in pairs) / count,
        mean_after=sum(after for _, _, after in pairs) / count,
        mean_change=sum(abs(after - before) for _, before, after in pairs) / count,
        tau=(concordant - discordant) / compared if compared else None,
        moved=tuple(sorted(pairs, key=lambda pair: -abs(pair[2] - pair[1]))),
    )
