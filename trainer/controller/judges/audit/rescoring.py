"""Rescoring: compares the verdicts of another judge, or another version, with earlier ones. Pure.

Trajectories with both scores count. The comparison has Kendall's tau-a over pairs within groups (concordant minus
discordant pairs, over all pairs) and the change of single scores.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

from ratchet.store.records import Verdict


@dataclass(frozen=True, slots=True)
class Comparison:
    """New verdicts compared with old ones. `tau` is None if all pairs are ties in both, means if nothing has both."""

    judged: int
    failures: int
    failure: str | None  # the commonest one
    failure_count: int
    mean_before: float | None
    mean_after: float | None
    mean_change: float | None  # mean |after - before|
    tau: float | None
    moved: tuple[tuple[str, float, float], ...]  # (trajectory, before, after), largest change first


def compare(groups: Sequence[tuple[Mapping[str, Verdict], Sequence[Verdict]]]) -> Comparison:
    """Return the comparison over groups of (old verdicts by trajectory, new verdicts)."""
    pairs: list[tuple[str, float, float]] = []
    failures: Counter[str] = Counter()
    concordant = discordant = compared = 0
    for old, new in groups:
        failures.update(str(verdict.failure) for verdict in new if verdict.score is None)
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
    failure, times = failures.most_common(1)[0] if failures else (None, 0)
    return Comparison(
        judged=len(pairs),
        failures=failures.total(),
        failure=failure,
        failure_count=times,
        mean_before=fmean(before for _, before, _ in pairs) if pairs else None,
        mean_after=fmean(after for _, _, after in pairs) if pairs else None,
        mean_change=fmean(abs(after - before) for _, before, after in pairs) if pairs else None,
        tau=(concordant - discordant) / compared if compared else None,
        moved=tuple(sorted(pairs, key=lambda pair: -abs(pair[2] - pair[1]))),
    )
