"""Relative judges: their scores only rank the members of one group, and are never averaged across groups.

The trainer records whether each judge is relative. Code that uses scores across groups checks it first; an unrecorded
judge counts as absolute.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ratchet.store.reports.learning_report import LearningReport, learning_report, relative_report
from ratchet.store.reports.policy_movement import recent_movements
from ratchet.store.reports.unproven_versions import read_unproven
from ratchet.store.states import PolicyState

if TYPE_CHECKING:
    from ratchet.store.store import Store

_KIND = "judge"
_UNRELEASED = (PolicyState.RAMP, PolicyState.REJECTED)


def record_judge_scale(store: Store, alias: str, version: str, *, relative: bool) -> None:
    """Record whether a judge's version is relative, once."""
    known = store.observations.latest(alias, _KIND).get(version)
    if known is None or bool(known.content.get("relative")) is not relative:
        store.observations.add(alias, _KIND, version, {"relative": relative})


def is_relative(store: Store, alias: str, version: str | None) -> bool:
    """Return whether a judge's version is relative."""
    known = store.observations.latest(alias, _KIND).get(version or "")
    return known is not None and bool(known.content.get("relative"))


def read_learning_report(store: Store, alias: str) -> LearningReport:
    """Return the learning report on the newest judge's scores, with the unproven versions; without figures if the
    scores are relative.
    """
    unproven = read_unproven(store, alias)
    return replace(_learning_report(store, alias), unproven=None if unproven is None else unproven.describe())


def _learning_report(store: Store, alias: str) -> LearningReport:
    judge = store.groups.newest_judge_version(alias)
    if is_relative(store, alias, judge):
        return relative_report()
    rows = store.groups.score_tallies(alias, judge) if judge else []
    unreleased = [one.version for one in store.policies.all(alias) if one.state in _UNRELEASED]
    return learning_report(rows, recent_movements(store, alias), unreleased)
