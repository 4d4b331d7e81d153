"""Task families that fail, by the scores of live traffic. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from ratchet.store.records import PastScore


@dataclass(frozen=True, slots=True)
class FailingFamily:
    """A family with failed tasks. `worst`: the lowest-scoring attempt at each, newest task first."""

    family: str
    tasks: int
    mean: float  # over the failed tasks
    worst: tuple[PastScore, ...]


def failing_families(scores: Sequence[PastScore], *, threshold: float, min_failures: int) -> list[FailingFamily]:
    """Return the families with at least `min_failures` tasks whose mean score is below `threshold`, by name.

    `scores`: one per trajectory, oldest first.
    """
    attempts: dict[str, list[PastScore]] = {}
    for scored in scores:
        attempts.setdefault(scored.cohort, []).append(scored)
    failed: dict[str, list[list[PastScore]]] = {}
    for tried in attempts.values():
        if _mean(tried) < threshold:
            failed.setdefault(tried[0].family, []).append(tried)
    return [_family(name, tasks) for name, tasks in sorted(failed.items()) if len(tasks) >= min_failures]


def _family(name: str, tasks: Sequence[Sequence[PastScore]]) -> FailingFamily:
    newest = sorted(tasks, key=lambda tried: tried[-1].judged_at, reverse=True)
    worst = tuple(min(tried, key=lambda scored: scored.score) for tried in newest)
    return FailingFamily(name, len(tasks), fmean(_mean(tried) for tried in tasks), worst)


def _mean(tried: Sequence[PastScore]) -> float:
    return fmean(scored.score for scored in tried)


def plain(found: FailingFamily) -> Mapping[str, float]:
    """Return the figures for the evidence of a decision."""
    return {"failed_tasks": found.tasks, "mean": round(found.mean, 4)}
