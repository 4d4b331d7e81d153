"""Runs the judges of an agent: what waits is judged, failures are repeated, and verdicts are recorded."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from ratchet.store.errors import InvalidTransition
from ratchet.store.reasons import DropReason
from ratchet.store.records import Group, JudgeRequest, Trajectory, Transcript, Verdict
from ratchet.store.store import Store
from ratchet.trainer.advantages import AdvantageEstimator, JudgedGroup
from ratchet.trainer.background_work import ignore
from ratchet.trainer.judges.judgement import GroupJudgement, Judge, cut
from ratchet.trainer.judges.rejudging import SecondJudge
from ratchet.trainer.observability.progress import GATHERING, JUDGING, Progress

# Caches between the judge and the training round. Both are bounded, and the store always decides.
#
# `TranscriptCache` spares the round a second read of a trajectory, `JudgedGroupCache` a second computation of
# advantages. Both return what the store holds now: an entry that the store has overtaken is read or computed again. The
# judge's groups are put in by one thread while a round takes its own out in another.

_SCORED = ("score", "components", "baseline_mean", "baseline_std")  # fields of a verdict that advantages depend on


class TranscriptCache:
    """The transcripts of one alias that the judge has received and no round has used yet, at most `max_entries`."""

    def __init__(
        self, store: Store, max_entries: int = 512, on_read: Callable[[Transcript], None] | None = None
    ) -> None:
        """`on_read` is called with what was read for the judge."""
        self._store = store
        self._max_entries = max_entries
        self._on_read = on_read
        self._entries: dict[str, Transcript] = {}
        self._lock = threading.Lock()

    def read(self, trajectory_id: str) -> Transcript:
        transcript = self._store.trajectories.read(trajectory_id)
        with self._lock:
            _evict(self._entries, self._max_entries)
            self._entries[trajectory_id] = transcript
        if self._on_read is not None:
            self._on_read(transcript)
        return transcript

    def pop(self, trajectory_ids: Sequence[str]) -> list[Transcript]:
        """Return the current transcripts, in order, and forget them."""
        active = self._store.trajectories.last_active(trajectory_ids)
        return [self._pop(name, active.get(name)) for name in trajectory_ids]

    def _pop(self, trajectory_id: str, last_active_at: float | None) -> Transcript:
        with self._lock:
            entry = self._entries.pop(trajectory_id, None)
        if entry is not None and entry.trajectory.last_active_at == last_active_at:
            return entry
        return self._store.trajectories.read(trajectory_id)


class JudgedGroupCache:
    """The judged groups of one alias that no round has used yet, at most `max_entries`."""

    def __init__(self, store: Store, estimator: AdvantageEstimator, max_entries: int = 1024) -> None:
        self.estimator = estimator
        self._store = store
        self._max_entries = max_entries
        self._entries: dict[str, JudgedGroup] = {}
        self._lock = threading.Lock()

    def estimate(self, group: Group, members: Sequence[Trajectory], verdicts: Sequence[Verdict]) -> JudgedGroup:
        judged = self.estimator.estimate(group, members, verdicts)
        with self._lock:
            _evict(self._entries, self._max_entries)
            self._entries[group.id] = judged
        return judged

    def pop(self, groups: Sequence[Group], members: Mapping[str, Trajectory]) -> list[JudgedGroup]:
        """Return the groups of a round with their current verdicts, in order, and forget them.

        `members` holds the trajectories of all groups by id. Advantages are computed again only if a member or a score
        has changed since, or after a restart.
        """
        current = self._store.groups.verdicts([name for group in groups for name in group.members])
        return [
            self._pop(group, [members[name] for name in group.members], [current[name] for name in group.members])
            for group in groups
        ]

    def _pop(self, group: Group, members: Sequence[Trajectory], verdicts: Sequence[Verdict]) -> JudgedGroup:
        with self._lock:
            entry = self._entries.pop(group.id, None)
        if entry is None or _scored(entry.verdicts) != _scored(verdicts):
            return self.estimator.estimate(group, members, verdicts)
        return dataclasses.replace(entry, group=group, members=tuple(members), verdicts=tuple(verdicts))


def _scored(verdicts: Sequence[Verdict]) -> list[tuple[object, ...]]:
    return [(one.trajectory_id, *(getattr(one, name) for name in _SCORED)) for one in verdicts]


def _evict(entries: dict[str, Any], max_entries: int) -> None:
    """Remove the oldest entries until one more fits."""
    while len(entries) >= max_entries:
        del entries[next(iter(entries))]


# JudgeRunner: has ready groups judged, and raises an alarm if the scores carry no signal.
#
# Promises: a judge failure is never a score. Members without a score after the last attempt are dropped, and the others
# are compared if enough of them remain. A judge that is away drops nothing: its groups wait. A group whose scores do
# not differ is dropped as `no_variance`; several in a row raise an alarm that names the judge, the scores and the
# groups. A slow judge blocks nobody: groups are judged in threads, as many at a time as the judge allows, and the
# caller's thread records the verdicts. A judgement that takes very long is an alarm; it cannot be ended. The advantages
# of a group are computed here, once. `rejudging.py` judges again after feedback that came late.

log = logging.getLogger(__name__)

NO_SIGNAL_GROUPS = 5  # consecutive groups without variance that raise an alarm
_MAX_ZERO_VARIANCE = 1000  # groups
_ZERO_VARIANCE_NAMED = 5  # groups
_SINGLE_WEIGHT = 0.125  # of a group, in the alarm about missing signal
_RETRY_BACKOFF = 4.0  # factor from one retry of a group to the next
_MAX_BACKOFFS = 16  # more would only overflow
_MAX_OUTAGE_PAUSE = 60.0  # seconds until a judge that is away is asked again
_HANG_SECONDS = 600.0  # after which a judgement in progress is an alarm
_MAX_ALARM_CHARS = 500  # of a failure in an alarm; `ratchet judge show` has more
_MAX_QUEUED = 64  # groups that wait beside those that the judge has
_MAX_READ_SECONDS = 0.25  # for the transcripts of one call


@dataclass(frozen=True, slots=True)
class _PendingGroup:
    group: Group
    members: tuple[Trajectory, ...]
    sizes: tuple[dict[str, float], ...]
    feedback_ids: tuple[str, ...]  # the feedback that the judge sees
    judgement: Future[GroupJudgement]


@dataclass(frozen=True, slots=True)
class _RunningJudgement:
    alias: str
    of: str  # the group, or the single trajectory
    started: float  # monotonic


class JudgeRunner:
    """Moves ready groups to judged, or drops them with a reason."""

    def __init__(
        self,
        store: Store,
        judge: Judge,
        *,
        attempts: int,
        retry_seconds: float,
        alarm_after: int = NO_SIGNAL_GROUPS,
        judged: JudgedGroupCache | None = None,
        progress: Progress | None = None,
        second: SecondJudge | None = None,
        zero_variance: Sequence[tuple[Group, float]] = (),
        min_group_size: int = 2,
        on_done: Callable[[], None] = ignore,
        max_threads: int | None = None,
        on_requests: Callable[[Sequence[JudgeRequest]], None] = lambda requests: None,
    ) -> None:
        self._store = store
        self._judge = judge
        self._attempts = attempts
        self._retry_seconds = retry_seconds
        self._alarm_after = alarm_after
        self._judged = judged or JudgedGroupCache(store, AdvantageEstimator())
        self._progress = progress or Progress()
        self._second = second
        self._min_group_size = min_group_size
        self._zero_variance = list(zero_variance)  # groups in a row whose members all got the same score
        self._on_requests = on_requests
        self._on_done = on_done  # called in the judge's thread when there are results to collect
        threads = min(judge.concurrency, max_threads or judge.concurrency)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="judge")
        self._pending: dict[str, _PendingGroup] = {}
        self._away_since: float | None = None  # the first outage in a row
        self._running: dict[int, _RunningJudgement] = {}  # by thread
        self._hanging: set[_RunningJudgement] = set()  # those that are an alarm
        self.max_read_seconds = _MAX_READ_SECONDS  # of one `submit`
        self.hang_seconds = _HANG_SECONDS

    def submit(self, groups: Sequence[Group], read: Callable[[str], Transcript]) -> bool:
        """Queue groups for the judge, unless they are queued already or the queue is full.

        Returns whether groups are left for the next call. Reads transcripts for `max_read_seconds` only, because
        other agents wait; `on_done` is called if groups are left for that reason.
        """
        until = time.monotonic() + self.max_read_seconds
        for group in groups:
            if group.id in self._pending:
                continue
            if len(self._pending) >= 2 * self._judge.concurrency + _MAX_QUEUED:
                return True
            if time.monotonic() > until:
                self._on_done()
                return True
            members = [read(name) for name in group.members]
            self._pending[group.id] = _PendingGroup(
                group,
                tuple(one.trajectory for one in members),
                tuple(
                    {"tokens": sum(c.completion_tokens for c in one.calls), "calls": len(one.calls)} for one in members
                ),
                tuple(feedback.id for one in members for feedback in one.feedback),
                self.submit_judge(group.id, members),
            )
            self._progress.add_pending(JUDGING)
            if self._second is not None and self._away_since is None:  # else it would be asked at every retry
                self._second.offer(group.id, members)
        return False

    def submit_judge(self, group_id: str | None, members: Sequence[Transcript]) -> Future[GroupJudgement]:
        judgement = self._threads.submit(self._judge_now, group_id, members)
        judgement.add_done_callback(lambda _: self._on_done())
        return judgement

    def _judge_now(self, group_id: str | None, members: Sequence[Transcript]) -> GroupJudgement:
        """Judge in a thread of the pool, and say meanwhile what is judged since when."""
        if members:
            run = members[0].trajectory
            of = f"group {group_id}" if group_id else f"trajectory {run.id}"
            self._running[threading.get_ident()] = _RunningJudgement(run.alias, of, time.monotonic())
        try:
            return self._judge.judge(group_id, members)
        finally:
            self._running.pop(threading.get_ident(), None)

    def collect_results(self, now: float, timeout: float) -> int:
        """Record finished judgements, after waiting at most `timeout` seconds for them; return how many groups."""
        self._watch_running()
        if not self._pending:
            return 0
        done, _ = wait([pending.judgement for pending in self._pending.values()], timeout=timeout)
        for pending in [pending for pending in self._pending.values() if pending.judgement in done]:
            del self._pending[pending.group.id]
            judgement = pending.judgement.result()
            try:
                self._record(pending.group, pending.members, pending.feedback_ids, judgement, now)
            except InvalidTransition as dropped:  # with the version that sampled it
                log.info("event=verdict_too_late group=%s reason=%r", pending.group.id, str(dropped))
            if judgement.unavailable is None:
                self._note_progress(pending.sizes, judgement)
            self._progress.finish_pending(JUDGING)
            if self._second is not None:
                self._second.compare(pending.group.id, judgement.verdicts)
        return len(done)

    def close(self) -> None:
        """Stop judging. Groups without a recorded verdict are judged again after the next start."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._judge.close()
        if self._second is not None:
            self._second.close()

    def _watch_running(self) -> None:
        """Raise an alarm once judgements take too long, and clear it once they have ended."""
        late = time.monotonic() - self.hang_seconds
        hanging = {one for one in list(self._running.values()) if one.started < late}
        if hanging == self._hanging:
            return
        for one in sorted(hanging - self._hanging, key=lambda one: one.started):
            self._store.alarms.raise_(
                f"judge_hangs:{one.alias}",
                f"judge {self._judge.name} has been judging {one.of} for over {self.hang_seconds:g} s, and what waits "
                "for it is not judged: give the calls inside the judge a time-out; if it never returns, restart the "
                "trainer",
            )
        if not hanging:
            self._store.alarms.clear(*{f"judge_hangs:{one.alias}" for one in self._hanging})
        self._hanging = hanging

    def _note_progress(self, sizes: Sequence[dict[str, float]], judgement: GroupJudgement) -> None:
        """Add a group's members to the running means. A failed verdict has no reward."""
        for size, verdict in zip(sizes, judgement.verdicts, strict=True):
            reward = {} if verdict.score is None else {"reward": verdict.score}
            self._progress.note(JUDGING, **reward, failed=float(verdict.score is None), seconds=verdict.latency)
            self._progress.note(GATHERING, **reward, **size)

    def _record(
        self,
        group: Group,
        members: Sequence[Trajectory],
        feedback_ids: Sequence[str],
        judgement: GroupJudgement,
        now: float,
    ) -> None:
        self._on_requests(judgement.judge_requests)
        if judgement.unavailable is not None:
            self._record_outage(group, judgement, judgement.unavailable, now)
            return
        self._away_since = None
        failed = {verdict.trajectory_id: verdict for verdict in judgement.verdicts if verdict.failure is not None}
        scored = [
            (member, verdict)
            for member, verdict in zip(members, judgement.verdicts, strict=True)
            if verdict.trajectory_id not in failed
        ]
        last = group.failures + 1 >= self._attempts
        if failed and last and len(scored) < self._min_group_size:
            self._store.groups.record_judge_failure(group.id, judgement.verdicts, now, judgement.judge_requests)
            self._store.groups.drop(group.id, DropReason.JUDGE_FAILED)
        elif failed and not last:
            self._store.groups.record_judge_failure(
                group.id, judgement.verdicts, now + self._retry_delay(group), judgement.judge_requests
            )
        else:
            self._record_scores(group, judgement, scored, list(failed))
            if feedback_ids:
                self._store.feedback.mark_applied(feedback_ids, now)
        if failed:
            self._alarm_judge_failed(group, judgement, list(failed.values()), left=len(scored) if last else None)

    def _record_outage(self, group: Group, judgement: GroupJudgement, reason: str, now: float) -> None:
        """Let a group wait for a judge that is away, however long, with an alarm. That is no attempt of the judge.

        The pauses grow with the outage. Requests that were not answered are not stored: there may be very many.
        """
        self._away_since = now if self._away_since is None else self._away_since
        delay = min(max(self._retry_seconds, now - self._away_since), _MAX_OUTAGE_PAUSE)
        answered = [one for one in judgement.judge_requests if one.status == 200]
        self._store.groups.record_judge_failure(group.id, (), now + delay, answered, counts=False)
        judge = judgement.verdicts[0].judge if judgement.verdicts else self._judge.name
        self._store.alarms.raise_(
            f"{DropReason.JUDGE_FAILED}:{group.alias}",
            f"{judge} judges nothing: {reason}; trajectories wait, and group {group.id} is judged again in {delay:g} s",
        )

    def _record_scores(
        self,
        group: Group,
        judgement: GroupJudgement,
        scored: Sequence[tuple[Trajectory, Verdict]],
        failed: Sequence[str],
    ) -> None:
        """Move a group on with its `scored` members; drop the `failed` ones."""
        judged = self._judged.estimate(group, [member for member, _ in scored], [verdict for _, verdict in scored])
        signal = True if judgement.teacher_scores else judged.has_signal
        drop_reason = None if signal else DropReason.BASELINE_ONLY if signal is None else DropReason.NO_VARIANCE
        verdicts = {verdict.trajectory_id: verdict for verdict in judgement.verdicts}
        verdicts |= {verdict.trajectory_id: verdict for verdict in judged.verdicts}
        self._store.groups.record_verdicts(
            group.id,
            list(verdicts.values()),
            judgement.judge_requests,
            drop_reason,
            dict.fromkeys(failed, DropReason.JUDGE_FAILED),
            judgement.teacher_scores,
        )
        self._judged.estimator.remember(judged.members, judged.verdicts)
        over = [] if failed else [f"{DropReason.JUDGE_FAILED}:{group.alias}"]
        if not self._hanging:  # an earlier trainer's
            over.append(f"judge_hangs:{group.alias}")
        if signal:
            self._zero_variance.clear()
            over.append(f"no_signal:{group.alias}")
        if over:
            self._store.alarms.clear(*over)
        if signal is not None and not signal:
            score = judged.verdicts[0].score or 0.0
            self._zero_variance = [*self._zero_variance[1 - _MAX_ZERO_VARIANCE :], (group, score)]
            self._alarm_no_signal(group)

    def _retry_delay(self, group: Group) -> float:
        return self._retry_seconds * _RETRY_BACKOFF ** min(group.failures, _MAX_BACKOFFS)

    def _alarm_judge_failed(
        self, group: Group, judgement: GroupJudgement, failed: Sequence[Verdict], left: int | None
    ) -> None:
        """Report a judge failure; `left` is the number of scored members, None before the last attempt."""
        reason = cut(failed[0].failure or "", _MAX_ALARM_CHARS)
        log.warning(
            "event=judge_failed group=%s attempt=%d of=%d failures=%d judge=%s reason=%r",
            group.id, group.failures + 1, self._attempts, len(failed), self._judge.name, reason,
        )  # fmt: skip
        if left is None and not group.failures:
            return
        outcome = (
            f"the group is judged again in {self._retry_delay(group):g} s"
            if left is None
            else "the group was dropped, not scored 0"
            if left < self._min_group_size
            else f"they were dropped, not scored 0, and the other {left} are compared"
        )
        self._store.alarms.raise_(
            f"{DropReason.JUDGE_FAILED}:{group.alias}",
            f"judge {self._judge.name} failed {group.failures + 1} times on group {group.id} "
            f"({len(failed)} of {len(judgement.verdicts)} members, e.g. {reason}); {outcome}",
        )

    def _alarm_no_signal(self, group: Group) -> None:
        weights = (1.0 if len(one.members) > 1 else _SINGLE_WEIGHT for one, _ in self._zero_variance)
        if sum(weights) < self._alarm_after:
            return
        members = sum(len(one.members) for one, _ in self._zero_variance)
        scores = sorted({score for _, score in self._zero_variance})
        given = (
            f"{scores[0]:g} to all {members} trajectories"
            if len(scores) == 1
            else f"all trajectories of a group the same score, {', '.join(f'{one:g}' for one in scores[:5])} in turn"
        )
        if noise := self._judged.estimator.noise:
            given += f", within its noise of {noise:g}"
        named = ", ".join(one.id for one, _ in self._zero_variance[-_ZERO_VARIANCE_NAMED:])
        reason = (
            f"last {len(self._zero_variance)} groups: no variance, judge {self._judge.name} gave {given} "
            f"(groups {named}); they were not trained: see `ratchet judge show {group.id}`"
        )
        self._store.alarms.raise_(f"no_signal:{group.alias}", reason)
        log.warning("event=no_signal groups=%d judge=%s reason=%r", len(self._zero_variance), self._judge.name, reason)


def zero_variance_groups(store: Store, alias: str) -> list[tuple[Group, float]]:
    """Return the newest consecutive zero-variance groups with their score, as an earlier trainer left them."""
    groups = store.groups.newly_dropped(alias, DropReason.NO_VARIANCE, _MAX_ZERO_VARIANCE)
    scores = store.groups.verdicts([group.members[0] for group in groups if group.members]) if groups else {}
    return [
        (group, scores[group.members[0]].score or 0.0)
        for group in groups
        if group.members and group.members[0] in scores
    ]
