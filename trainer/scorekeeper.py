"""Scorekeeping: has ready groups judged, and says loudly when the scores teach nothing.

Promises: a judge failure is never a score; a group whose scores do not differ is dropped with that reason and counted;
several of them in a row are an alarm that names the judge, the score and the groups.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from store import Store
from store.records import Group, Transcript, Verdict
from trainer.advantage import has_signal
from trainer.judges import Judge

log = logging.getLogger(__name__)

JUDGE_FAILED = "judge_failed"
NO_VARIANCE = "no_variance"
_FLAT_REMEMBERED = 1000  # groups


class Scorekeeper:
    """Takes ready groups to judged, or drops them with the reason."""

    def __init__(self, store: Store, judge: Judge, *, attempts: int, retry_seconds: float, alarm_after: int) -> None:
        self._store = store
        self._judge = judge
        self._attempts = attempts
        self._retry_seconds = retry_seconds
        self._alarm_after = alarm_after
        self._flat: list[tuple[Group, float]] = []  # groups in a row whose members all got the same score

    def score(self, group: Group, members: Sequence[Transcript], now: float) -> None:
        """Have one group judged and move it on."""
        verdicts = self._judge.judge(group.id, members)
        failed = [verdict for verdict in verdicts if verdict.failure is not None]
        if failed:
            self._failed(group, verdicts, failed, now)
            return
        self._store.groups.record(group.id, verdicts)
        self._store.alarms.clear(self._name(JUDGE_FAILED, group))
        scores = [verdict.score for verdict in verdicts if verdict.score is not None]
        if has_signal(scores):
            self._flat.clear()
            self._store.alarms.clear(self._name("no_signal", group))
        else:
            self._store.groups.drop(group.id, NO_VARIANCE)
            self._flat = [*self._flat[1 - _FLAT_REMEMBERED :], (group, scores[0])]
            self._warn_of_flatness(group)

    def _failed(self, group: Group, verdicts: Sequence[Verdict], failed: Sequence[Verdict], now: float) -> None:
        self._store.groups.fail(group.id, verdicts, retry_at=now + self._retry_seconds)
        reason = failed[0].failure
        log.warning(
            "event=judge_failed group=%s attempt=%d of=%d failures=%d judge=%s reason=%r",
            group.id, group.failures + 1, self._attempts, len(failed), self._judge.name, reason,
        )  # fmt: skip
        if group.failures + 1 < self._attempts:
            return
        self._store.groups.drop(group.id, JUDGE_FAILED)
        self._store.alarms.raise_(
            self._name(JUDGE_FAILED, group),
            f"judge {self._judge.name} failed {self._attempts} times on group {group.id} "
            f"({len(failed)} of {len(verdicts)} members, e.g. {reason}); the group was dropped, not scored 0",
        )

    def _warn_of_flatness(self, group: Group) -> None:
        if len(self._flat) < self._alarm_after:
            return
        members = sum(len(flat.members) for flat, _ in self._flat)
        scores = sorted({score for _, score in self._flat})
        given = f"{scores[0]:g} to all {members}" if len(scores) == 1 else f"within each group the same of {scores[:5]}"
        reason = (
            f"last {len(self._flat)} groups: no variance, judge {self._judge.name} gave {given} trajectories "
            f"(newest group {group.id}); nothing was learnt from them"
        )
        self._store.alarms.raise_(self._name("no_signal", group), reason)
        log.warning("event=no_signal groups=%d judge=%s reason=%r", len(self._flat), self._judge.name, reason)

    @staticmethod
    def _name(kind: str, group: Group) -> str:
        return f"{kind}:{group.alias}"
