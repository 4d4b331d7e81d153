"""Judges whose scores compare the members of one group and say nothing beyond it: such scores are never averaged.

The trainer notes each judge that it works with; whoever shows or uses scores across groups asks here first. A judge
that was never noted counts as one that scores each answer by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratchet.store.reports.learning_report import LearningReport, learning_report, relative_report
from ratchet.store.reports.policy_movement import recent_movements

if TYPE_CHECKING:
    from ratchet.store.store import Store

_KIND = "judge"


def record_judge_scale(store: Store, alias: str, version: str, *, relative: bool) -> None:
    """Record whether the scores of a judge's version are relative, once."""
    known = store.observations.latest(alias, _KIND).get(version)
    if known is None or bool(known.content.get("relative")) is not relative:
        store.observations.add(alias, _KIND, version, {"relative": relative})


def is_relative(store: Store, alias: str, version: str | None) -> bool:
    """Return whether a judge's version only ranks the members of a group."""
    known = store.observations.latest(alias, _KIND).get(version or "")
    return known is not None and bool(known.content.get("relative"))


def read_learning_report(store: Store, alias: str) -> LearningReport:
    """Return the learning report on the newest judge's scores; of relative ones no figure."""
    judge = store.groups.newest_judge_version(alias)
    if is_relative(store, alias, judge):
        return relative_report()
    return learning_report(store.groups.score_tallies(alias, judge) if judge else [], recent_movements(store, alias))
