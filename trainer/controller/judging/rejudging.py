"""Rejudger: judges trajectories again after late feedback.

Promises: verdicts are only added; no state changes, so nothing is trained twice; for a trajectory that was trained
already, the log and the new verdict name the versions it trained. A group is judged again as a whole, since scores may
be relative; only changed scores are recorded. Retries of a failing judge are bounded; one that is away is waited for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

import msgspec

from ratchet.store.errors import RecordDamaged
from ratchet.store.records import Trajectory, Transcript, Verdict
from ratchet.store.store import Store
from ratchet.trainer.controller.advantages.estimator import AdvantageEstimator
from ratchet.trainer.controller.judges import GroupJudgement

log = logging.getLogger(__name__)

_KEPT = ("baseline_mean", "baseline_std")  # fields of the earlier verdict that the new one keeps
_MAX_PENDING = 64  # groups

SubmitJudge = Callable[[str | None, Sequence[Transcript]], "Future[GroupJudgement]"]


@dataclass(slots=True)
class _PendingRejudging:
    """A group, or a trajectory without one, that is judged again."""

    members: tuple[Transcript, ...]
    judgement: Future[GroupJudgement] | None = None  # None: to be submitted again at `due_at`
    failures: int = 0
    due_at: float = 0.0

    @property
    def feedback_ids(self) -> list[str]:
        """The feedback on the members that the judge sees."""
        return [feedback.id for member in self.members for feedback in member.feedback]


class Rejudger:
    """Judges the trajectories of one alias again."""

    def __init__(
        self,
        store: Store,
        alias: str,
        submit_judge: SubmitJudge,
        estimator: AdvantageEstimator,
        *,
        attempts: int,
        retry_seconds: float,
    ) -> None:
        self._store = store
        self._alias = alias
        self._submit_judge = submit_judge
        self._estimator = estimator
        self._attempts = attempts
        self._retry_seconds = retry_seconds
        self._pending: dict[str, _PendingRejudging] = {}

    def submit_late_feedback(self, now: float) -> None:
        """Queue everything that got feedback after its verdict."""
        for name in self._store.feedback.applied_too_late(self._alias, limit=_MAX_PENDING):
            trajectory = self._store.trajectories.get(name)
            key = trajectory.group_id or name
            pending = self._pending.get(key)
            if pending is not None and (pending.judgement is not None or now < pending.due_at):
                continue
            names = self._store.groups.get(trajectory.group_id).members if trajectory.group_id else (name,)
            names = names if name in names else (name,)  # it was dropped from its group
            failures = pending.failures if pending else 0
            try:
                members = tuple(self._store.trajectories.read(one) for one in names)
            except RecordDamaged as damaged:
                self._put_off(key, failures, damaged, now)
                continue
            judgement = self._submit_judge(trajectory.group_id, members)
            self._pending[key] = _PendingRejudging(members, judgement, failures)

    def collect_results(self, now: float, timeout: float) -> int:
        """Record finished judgements, after waiting at most `timeout` seconds; return how many scores changed."""
        wait([one.judgement for one in self._pending.values() if one.judgement is not None], timeout=timeout)
        changed = 0
        for key, pending in list(self._pending.items()):
            if pending.judgement is None or not pending.judgement.done():
                continue
            try:
                changed += self._record(key, pending, pending.judgement.result(), now)
            except RecordDamaged as damaged:  # the judge reads calls that it continues
                self._put_off(key, pending.failures, damaged, now)
        return changed

    def _put_off(self, key: str, failures: int, damaged: RecordDamaged, now: float) -> None:
        """Try again later: the row may be mended."""
        log.warning("event=rejudging_failed of=%s reason=%r", key, str(damaged))
        self._pending[key] = _PendingRejudging((), None, failures, now + self._retry_seconds)

    def _record(self, key: str, pending: _PendingRejudging, judgement: GroupJudgement, now: float) -> int:
        if judgement.unavailable is not None:
            log.warning("event=rejudging_waits of=%s reason=%r", key, judgement.unavailable)
            self._pending[key] = _PendingRejudging((), None, pending.failures, now + self._retry_seconds)
            return 0
        valued = {member.trajectory.id for member in pending.members if _has_value(member)}
        failed = [one for one in judgement.verdicts if one.trajectory_id in valued and one.score is None]
        if failed and pending.failures + 1 < self._attempts:
            self._pending[key] = _PendingRejudging((), None, pending.failures + 1, now + self._retry_seconds)
            return 0
        if failed:
            log.warning("event=rejudging_failed of=%s failures=%d reason=%r", key, len(failed), failed[0].failure)
        changed = self._changed_scores(pending.members, judgement.verdicts)
        self._store.groups.replace_verdicts([verdict for _, verdict in changed], judgement.judge_requests)
        self._store.feedback.mark_applied(pending.feedback_ids, now)
        self._estimator.remember([trajectory for trajectory, _ in changed], [verdict for _, verdict in changed])
        del self._pending[key]
        return len(changed)

    def _changed_scores(
        self, members: Sequence[Transcript], verdicts: Sequence[Verdict]
    ) -> list[tuple[Trajectory, Verdict]]:
        """Return the verdicts whose score differs from the earlier one, with a note of what the earlier one trained."""
        names = [member.trajectory.id for member in members]
        before, trained = self._store.groups.verdicts(names), self._store.lineage.versions_of(names)
        changed: list[tuple[Trajectory, Verdict]] = []
        for member, verdict in zip(members, verdicts, strict=True):
            trajectory = member.trajectory
            old = before[trajectory.id].score if trajectory.id in before else None
            if verdict.score is None or verdict.score == old:
                continue
            policies = trained.get(trajectory.id, ())
            log.info(
                "event=late_feedback trajectory=%s before=%s after=%g trained=%s",
                trajectory.id, old, verdict.score, ",".join(policies) or "nothing",
            )  # fmt: skip
            note = f"[after it trained {', '.join(policies)}] " if policies else "[late] "
            kept = {name: getattr(before[trajectory.id], name) for name in _KEPT} if trajectory.id in before else {}
            new = msgspec.structs.replace(verdict, explanation=note + verdict.explanation, **kept)
            changed.append((trajectory, new))
        return changed


def _has_value(member: Transcript) -> bool:
    return any(feedback.value is not None for feedback in member.feedback)
