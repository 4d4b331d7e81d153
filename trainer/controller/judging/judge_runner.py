"""Scorekeeping: has ready groups judged, and says loudly when the scores teach nothing.

Promises: a judge failure is never a score: who has none after the last try is put aside, and the others are compared if
they are enough; a group whose scores do not differ is dropped with that reason and counted; several of them in a row
are an alarm that names the judge, the score and the groups. A slow judge holds nobody up: groups are judged in threads,
as many at once as the judge allows, and the caller's thread writes down what was said. What people say after the
verdict is judged anew in the same way; that is `rehearing.py`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from ratchet.store.errors import InvalidTransition
from ratchet.store.reasons import DropReason
from ratchet.store.records import Group, Trajectory, Transcript, Verdict
from ratchet.store.store import Store
from ratchet.trainer.controller.advantages.estimator import AdvantageEstimator
from ratchet.trainer.controller.judges import Judge, Judgement
from ratchet.trainer.controller.judging.second_judge import SecondJudge
from ratchet.trainer.observability.progress import GATHERING, JUDGING, Progress

log = logging.getLogger(__name__)

_MAX_ZERO_VARIANCE = 1000  # groups
_FLAT_NAMED = 5  # groups
_SINGLE_WEIGHT = 0.125  # of a group, in the alarm about missing signal
_PAUSE_GROWS = 4.0  # times, from one failure of a judge on a group to the next
_AHEAD = 64  # groups that wait for a quick judge beside those that it has


@dataclass(frozen=True, slots=True)
class _Asked:
    group: Group
    members: tuple[Trajectory, ...]
    measures: tuple[dict[str, float], ...]
    heard: tuple[str, ...]  # feedback that the judge has before it
    answer: Future[Judgement]


class JudgeRunner:
    """Takes ready groups to judged, or drops them with the reason."""

    def __init__(
        self,
        store: Store,
        judge: Judge,
        *,
        attempts: int,
        retry_seconds: float,
        alarm_after: int,
        credit: AdvantageEstimator | None = None,
        progress: Progress | None = None,
        second: SecondJudge | None = None,
        flat: Sequence[tuple[Group, float]] = (),
        least: int = 2,
    ) -> None:
        self._least = least  # members that are worth comparing
        self._second = second
        self._progress = progress or Progress()
        self._store = store
        self._judge = judge
        self._credit = credit or AdvantageEstimator()
        self._attempts = attempts
        self._retry_seconds = retry_seconds
        self._alarm_after = alarm_after
        self._zero_variance: list[tuple[Group, float]] = list(
            flat
        )  # groups in a row whose members all got the same score
        self._threads = ThreadPoolExecutor(judge.concurrency, thread_name_prefix="judge")
        self._asked: dict[str, _Asked] = {}

    def score(self, group: Group, members: Sequence[Transcript], now: float) -> None:
        """Have one group judged and move it on."""
        self._write_down(group, _runs(members), _feedback(members), self._judge.judge(group.id, members), now)

    def ask(self, groups: Sequence[Group], read: Callable[[str], Transcript]) -> None:
        """Have groups judged that are not being judged already; a few more than the judge takes at once may wait."""
        for group in groups:
            if group.id in self._asked or len(self._asked) >= 2 * self._judge.concurrency + _AHEAD:
                continue
            members = [read(name) for name in group.members]
            answer = self.ask_judge(group.id, members)
            measures = tuple(map(_measures, members))
            self._asked[group.id] = _Asked(group, _runs(members), measures, _feedback(members), answer)
            self._progress.add_pending(JUDGING)
            if self._second is not None:
                self._second.offer(group.id, members)

    def ask_judge(self, group_id: str | None, members: Sequence[Transcript]) -> Future[Judgement]:
        """Have the judge say something, in its turn, that the caller writes down."""
        return self._threads.submit(self._judge.judge, group_id, members)

    def collect(self, now: float, patience: float) -> int:
        """Write down what has been said, after waiting for the first of it at most `patience` seconds; count groups."""
        if not self._asked:
            return 0
        done, _ = wait([asked.answer for asked in self._asked.values()], timeout=patience)
        for asked in [asked for asked in self._asked.values() if asked.answer in done]:
            del self._asked[asked.group.id]
            judgement = asked.answer.result()
            try:
                self._write_down(asked.group, asked.members, asked.heard, judgement, now)
            except InvalidTransition as dropped:  # with the version that sampled it
                log.info("event=verdict_too_late group=%s reason=%r", asked.group.id, str(dropped))
            self._tell(asked.measures, judgement)
            if self._second is not None:
                self._second.compare(asked.group.id, judgement.verdicts)
        return len(done)

    def close(self) -> None:
        """Ask no more; what is being judged is judged again after the next start."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._judge.close()
        if self._second is not None:
            self._second.close()

    def _tell(self, measures: Sequence[dict[str, float]], judgement: Judgement) -> None:
        """Add a group's members to the running means; a failed verdict has no reward, and its own divisor."""
        for measured, verdict in zip(measures, judgement.verdicts, strict=True):
            reward = {} if verdict.score is None else {"reward": verdict.score}
            self._progress.note(JUDGING, **reward, failed=float(verdict.score is None), seconds=verdict.latency)
            self._progress.note(GATHERING, **reward, **measured)
        self._progress.finish_pending(JUDGING)

    def _write_down(
        self, group: Group, members: Sequence[Trajectory], heard: Sequence[str], judgement: Judgement, now: float
    ) -> None:
        failed = {verdict.trajectory_id: verdict for verdict in judgement.verdicts if verdict.failure is not None}
        left = [
            (member, verdict)
            for member, verdict in zip(members, judgement.verdicts, strict=True)
            if verdict.trajectory_id not in failed
        ]
        last = group.failures + 1 >= self._attempts
        if failed and last and len(left) < self._least:
            self._store.groups.record_judge_failure(group.id, judgement.verdicts, now, judgement.judge_requests)
            self._store.groups.drop(group.id, DropReason.JUDGE_FAILED)
        elif failed and not last:
            self._store.groups.record_judge_failure(
                group.id, judgement.verdicts, now + self._pause(group), judgement.judge_requests
            )
        else:
            self._settle(group, judgement, [run for run, _ in left], [said for _, said in left], list(failed))
            if heard:
                self._store.feedback.mark_applied(heard, now)
        if failed:
            self._alarm_judge_failed(group, judgement, list(failed.values()), left=len(left) if last else None)

    def _settle(
        self,
        group: Group,
        judgement: Judgement,
        members: Sequence[Trajectory],
        verdicts: Sequence[Verdict],
        failed: Sequence[str],
    ) -> None:
        """Move a group on whose `members` have `verdicts`; the `failed` ones are put aside."""
        verdicts = self._credit.with_baseline(members, verdicts)
        teaches = self._credit.teaches(members, verdicts)
        useless = DropReason.BASELINE_ONLY if teaches is None else None if teaches else DropReason.NO_VARIANCE
        said = {verdict.trajectory_id: verdict for verdict in judgement.verdicts}
        said |= {verdict.trajectory_id: verdict for verdict in verdicts}
        self._store.groups.record_verdicts(
            group.id,
            list(said.values()),
            judgement.judge_requests,
            useless,
            dict.fromkeys(failed, DropReason.JUDGE_FAILED),
        )
        self._credit.remember(members, verdicts)
        if not failed:
            self._store.alarms.clear(self._name(DropReason.JUDGE_FAILED, group))
        if teaches:
            self._zero_variance.clear()
            self._store.alarms.clear(self._name("no_signal", group))
        elif teaches is not None:
            self._zero_variance = [*self._zero_variance[1 - _MAX_ZERO_VARIANCE :], (group, verdicts[0].score or 0.0)]
            self._alarm_no_signal(group)

    def _pause(self, group: Group) -> float:
        return self._retry_seconds * _PAUSE_GROWS**group.failures

    def _alarm_judge_failed(
        self, group: Group, judgement: Judgement, failed: Sequence[Verdict], left: int | None
    ) -> None:
        """Say that a judge failed; `left` are the members that go on without the others, None before the last try."""
        reason = failed[0].failure
        log.warning(
            "event=judge_failed group=%s attempt=%d of=%d failures=%d judge=%s reason=%r",
            group.id, group.failures + 1, self._attempts, len(failed), self._judge.name, reason,
        )  # fmt: skip
        if left is None and not group.failures:
            return
        what = (
            f"the group is judged again in {self._pause(group):g} s"
            if left is None
            else "the group was dropped, not scored 0"
            if left < self._least
            else f"they were dropped, not scored 0, and the other {left} are compared"
        )
        self._store.alarms.raise_(
            self._name(DropReason.JUDGE_FAILED, group),
            f"judge {self._judge.name} failed {group.failures + 1} times on group {group.id} "
            f"({len(failed)} of {len(judgement.verdicts)} members, e.g. {reason}); {what}",
        )

    def _alarm_no_signal(self, group: Group) -> None:
        members = sum(len(flat.members) for flat, _ in self._zero_variance)
        if sum(1.0 if len(flat.members) > 1 else _SINGLE_WEIGHT for flat, _ in self._zero_variance) < self._alarm_after:
            return
        scores = sorted({score for _, score in self._zero_variance})
        given = f"{scores[0]:g} to all {members}" if len(scores) == 1 else f"within each group the same of {scores[:5]}"
        named = ", ".join(flat.id for flat, _ in self._zero_variance[-_FLAT_NAMED:])
        reason = (
            f"last {len(self._zero_variance)} groups: no variance, judge {self._judge.name} gave {given} trajectories "
            f"(groups {named}); nothing was learnt from them: see `ratchet judge show {group.id}`"
        )
        self._store.alarms.raise_(self._name("no_signal", group), reason)
        log.warning("event=no_signal groups=%d judge=%s reason=%r", len(self._zero_variance), self._judge.name, reason)

    @staticmethod
    def _name(kind: str, group: Group) -> str:
        return f"{kind}:{group.alias}"


def zero_variance_groups(store: Store, alias: str) -> list[tuple[Group, float]]:
    """Return the newest groups in a row whose members all got the same score, as an earlier trainer left them."""
    groups = store.groups.newly_dropped(alias, DropReason.NO_VARIANCE, _MAX_ZERO_VARIANCE)
    scores = store.groups.verdicts([group.members[0] for group in groups if group.members]) if groups else {}
    return [
        (group, scores[group.members[0]].score or 0.0)
        for group in groups
        if group.members and group.members[0] in scores
    ]


def _measures(member: Transcript) -> dict[str, float]:
    return {"tokens": sum(call.completion_tokens for call in member.calls), "calls": len(member.calls)}


def _runs(members: Sequence[Transcript]) -> tuple[Trajectory, ...]:
    return tuple(member.trajectory for member in members)


def _feedback(members: Sequence[Transcript]) -> tuple[str, ...]:
    return tuple(said.id for member in members for said in member.feedback)
