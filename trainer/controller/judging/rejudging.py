"""Rejudger: judges anew what people spoke of after its verdict.

Promises: verdicts are only added; nothing moves to another state, so that nothing is trained twice; a trajectory that
was trained already is told with the policies that learned from it. A group is judged as a whole again, since a score
may be relative; only scores that changed are written down. A judge that goes on failing is not asked for ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

import msgspec

from ratchet.store.records import Trajectory, Transcript, Verdict
from ratchet.store.store import Store
from ratchet.trainer.controller.advantages.estimator import AdvantageEstimator
from ratchet.trainer.controller.judges import Judgement

log = logging.getLogger(__name__)

_KEPT = ("baseline_mean", "baseline_std")  # of a verdict: what the trajectory was compared with before
_AT_ONCE = 64  # groups that are heard again at the same time

Ask = Callable[[str | None, Sequence[Transcript]], "Future[Judgement]"]


@dataclass(slots=True)
class _PendingRejudging:
    """A group, or a trajectory that was never in one, before the judge again."""

    members: tuple[Transcript, ...]
    answer: Future[Judgement] | None = None  # None: to be asked again at `due_at`
    failures: int = 0
    due_at: float = 0.0

    @property
    def heard(self) -> list[str]:
        """What people said of the members, as the judge has seen it."""
        return [said.id for member in self.members for said in member.feedback]


class Rejudger:
    """The rehearings of one alias."""

    def __init__(
        self, store: Store, alias: str, ask: Ask, credit: AdvantageEstimator, *, attempts: int, retry_seconds: float
    ) -> None:
        self._store = store
        self._alias = alias
        self._ask = ask
        self._credit = credit
        self._attempts = attempts
        self._retry_seconds = retry_seconds
        self._pending: dict[str, _PendingRejudging] = {}

    def look(self, now: float) -> None:
        """Ask the judge about whatever people spoke of since its verdict."""
        for name in self._store.feedback.applied_too_late(self._alias, limit=_AT_ONCE):
            run = self._store.trajectories.get(name)
            key = run.group_id or name
            hearing = self._pending.get(key)
            if hearing is not None and (hearing.answer is not None or now < hearing.due_at):
                continue
            names = self._store.groups.get(run.group_id).members if run.group_id else (name,)
            members = tuple(self._store.trajectories.read(one) for one in names)
            failures = hearing.failures if hearing else 0
            self._pending[key] = _PendingRejudging(members, self._ask(run.group_id, members), failures)

    def collect(self, now: float, patience: float) -> int:
        """Write down what the judge has said, after waiting at most `patience` seconds; count scores that changed."""
        wait([one.answer for one in self._pending.values() if one.answer is not None], timeout=patience)
        changed = 0
        for key, hearing in list(self._pending.items()):
            if hearing.answer is not None and hearing.answer.done():
                changed += self._write_down(key, hearing, hearing.answer.result(), now)
        return changed

    def _write_down(self, key: str, hearing: _PendingRejudging, judgement: Judgement, now: float) -> int:
        spoken_of = {member.trajectory.id for member in hearing.members if _was_valued(member)}
        failed = [one for one in judgement.verdicts if one.trajectory_id in spoken_of and one.score is None]
        if failed and hearing.failures + 1 < self._attempts:
            self._pending[key] = _PendingRejudging((), None, hearing.failures + 1, now + self._retry_seconds)
            return 0
        if failed:
            log.warning("event=rejudging_failed of=%s failures=%d reason=%r", key, len(failed), failed[0].failure)
        news = self._news(hearing.members, judgement.verdicts)
        self._store.groups.replace_verdicts([verdict for _, verdict in news], judgement.judge_requests)
        self._store.feedback.mark_applied(hearing.heard, now)
        self._credit.remember([run for run, _ in news], [verdict for _, verdict in news])
        del self._pending[key]
        return len(news)

    def _news(self, members: Sequence[Transcript], verdicts: Sequence[Verdict]) -> list[tuple[Trajectory, Verdict]]:
        """Return the scores that are not what they were, with what was trained on the old ones."""
        names = [member.trajectory.id for member in members]
        before, trained = self._store.groups.verdicts(names), self._store.lineage.versions_of(names)
        news: list[tuple[Trajectory, Verdict]] = []
        for member, verdict in zip(members, verdicts, strict=True):
            run = member.trajectory
            old = before[run.id].score if run.id in before else None
            if verdict.score is None or verdict.score == old:
                continue
            policies = trained.get(run.id, ())
            log.info(
                "event=late_feedback trajectory=%s before=%s after=%g trained=%s",
                run.id, old, verdict.score, ",".join(policies) or "nothing",
            )  # fmt: skip
            note = f"[after it trained {', '.join(policies)}] " if policies else "[late] "
            kept = {name: getattr(before[run.id], name) for name in _KEPT} if run.id in before else {}
            news.append((run, msgspec.structs.replace(verdict, explanation=note + verdict.explanation, **kept)))
        return news


def _was_valued(member: Transcript) -> bool:
    return any(said.value is not None for said in member.feedback)
