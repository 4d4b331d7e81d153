"""Runs the judges of an agent: what waits is judged, failures are repeated, and verdicts are recorded."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import msgspec

from ratchet.store.errors import InvalidTransition, RecordDamaged
from ratchet.store.reasons import DropReason
from ratchet.store.records import Group, JudgeRequest, Trajectory, Transcript, Verdict
from ratchet.store.store import Store
from ratchet.trainer.advantages import AdvantageEstimator
from ratchet.trainer.background_work import ignore
from ratchet.trainer.judges.judgement import GroupJudgement, Judge, cut
from ratchet.trainer.observability.metrics import Finding
from ratchet.trainer.observability.progress import GATHERING, JUDGING, Progress
from ratchet.trainer.statistics import kendall_tau_b


class TranscriptCache:
    """The transcripts of one alias that the judge has received and no round has used yet, at most `max_entries`.

    Spares the round a second read; one that the store has overtaken is read again. The judge puts transcripts in while
    a round takes its own out in another thread.
    """

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
            while len(self._entries) >= self._max_entries:
                del self._entries[next(iter(self._entries))]
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


# JudgeRunner: has ready groups judged, and raises an alarm if the scores carry no signal.
#
# Promises: a judge failure is never a score. Members without a score after the last attempt are dropped, and the others
# are compared if enough of them remain. A judge that is away drops nothing: its groups wait. A group whose scores do
# not differ is dropped as `no_variance`; several in a row raise an alarm that names the judge, the scores and the
# groups. A slow judge blocks nobody: groups are judged in threads, as many at a time as the judge allows, and the
# caller's thread records the verdicts. A judgement that takes very long is an alarm; it cannot be ended. A verdict
# keeps the baseline that it was compared with, so that the round's advantages are those that were found here. Late
# feedback has trajectories judged again: the new verdict names the versions that were trained with the old one.

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
_MAX_REJUDGED = 64  # groups, after late feedback
_KEPT_FIELDS = ("baseline_mean", "baseline_std")  # of an earlier verdict in the one after late feedback
_MAX_READ_SECONDS = 0.25  # for the transcripts of one call


@dataclass(frozen=True, slots=True)
class _PendingGroup:
    group: Group
    members: tuple[Transcript, ...]
    judgement: Future[GroupJudgement]


@dataclass(slots=True)
class _Rejudged:
    """What is judged again after late feedback."""

    members: tuple[Transcript, ...]
    judgement: Future[GroupJudgement] | None = None  # None: to be submitted again at `due_at`
    failures: int = 0
    due_at: float = 0.0


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
        estimator: AdvantageEstimator | None = None,
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
        self._estimator = estimator or AdvantageEstimator()
        self._progress = progress or Progress()
        self._second = second
        self._min_group_size = min_group_size
        self._zero_variance = list(zero_variance)  # groups in a row whose members all got the same score
        self._on_requests = on_requests
        self._on_done = on_done  # called in the judge's thread when there are results to collect
        threads = min(judge.concurrency, max_threads or judge.concurrency)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="judge")
        self._pending: dict[str, _PendingGroup] = {}
        self._rejudged: dict[str, _Rejudged] = {}  # by group, or by trajectory without one
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
            members = tuple(read(name) for name in group.members)
            self._pending[group.id] = _PendingGroup(group, members, self._submit(group.id, members))
            self._progress.add_pending(JUDGING)
        return False

    def _submit(self, group_id: str | None, members: Sequence[Transcript]) -> Future[GroupJudgement]:
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
        """Record finished judgements, after waiting at most `timeout` seconds for them.

        Returns how many groups were recorded, and scores changed after late feedback.
        """
        self._watch_running()
        rejudged = [one.judgement for one in self._rejudged.values() if one.judgement is not None]
        waiting = [pending.judgement for pending in self._pending.values()]
        done, _ = wait([*waiting, *rejudged], timeout=timeout)
        recorded = 0
        for pending in [pending for pending in self._pending.values() if pending.judgement in done]:
            group, members, judgement = pending.group, pending.members, pending.judgement.result()
            del self._pending[group.id]
            recorded += 1
            try:
                self._record(group, members, judgement, now)
            except InvalidTransition as dropped:  # with the version that sampled it
                log.info("event=verdict_too_late group=%s reason=%r", group.id, str(dropped))
            if judgement.unavailable is None:
                self._note_progress(members, judgement)
            self._progress.finish_pending(JUDGING)
            if self._second is not None:
                self._second.submit(group.id, members, judgement.verdicts)
        return recorded + self._collect_rejudged(now)

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

    def _note_progress(self, members: Sequence[Transcript], judgement: GroupJudgement) -> None:
        """Add a group's members to the running means. A failed verdict has no reward."""
        for member, verdict in zip(members, judgement.verdicts, strict=True):
            reward = {} if verdict.score is None else {"reward": verdict.score}
            tokens = sum(call.completion_tokens for call in member.calls)
            self._progress.note(JUDGING, **reward, failed=float(verdict.score is None), seconds=verdict.latency)
            self._progress.note(GATHERING, **reward, tokens=tokens, calls=len(member.calls))

    def _record(self, group: Group, members: Sequence[Transcript], judgement: GroupJudgement, now: float) -> None:
        self._on_requests(judgement.judge_requests)
        if judgement.unavailable is not None:
            self._record_outage(group, judgement, judgement.unavailable, now)
            return
        self._away_since = None
        failed = [verdict for verdict in judgement.verdicts if verdict.failure is not None]
        scored = [
            (member.trajectory, verdict)
            for member, verdict in zip(members, judgement.verdicts, strict=True)
            if verdict.failure is None
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
            self._record_scores(group, judgement, scored, [verdict.trajectory_id for verdict in failed])
            if seen := [one.id for member in members for one in member.feedback]:
                self._store.feedback.mark_applied(seen, now)
        if failed:
            self._alarm_judge_failed(group, judgement, failed, left=len(scored) if last else None)

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
        judged = self._estimator.estimate(group, [member for member, _ in scored], [verdict for _, verdict in scored])
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
        self._estimator.remember(judged.members, judged.verdicts)
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
        if noise := self._estimator.noise:
            given += f", within its noise of {noise:g}"
        named = ", ".join(one.id for one, _ in self._zero_variance[-_ZERO_VARIANCE_NAMED:])
        reason = (
            f"last {len(self._zero_variance)} groups: no variance, judge {self._judge.name} gave {given} "
            f"(groups {named}); they were not trained: see `ratchet judge show {group.id}`"
        )
        self._store.alarms.raise_(f"no_signal:{group.alias}", reason)
        log.warning("event=no_signal groups=%d judge=%s reason=%r", len(self._zero_variance), self._judge.name, reason)

    def judge_again(self, alias: str, now: float) -> None:
        """Queue everything that got feedback after its verdict: a group as a whole, since scores may be relative.

        Verdicts are only added, and no state changes, so nothing is trained twice.
        """
        for name in self._store.feedback.applied_too_late(alias, limit=_MAX_REJUDGED):
            trajectory = self._store.trajectories.get(name)
            key = trajectory.group_id or name
            pending = self._rejudged.get(key)
            if pending is not None and (pending.judgement is not None or now < pending.due_at):
                continue
            names = self._store.groups.get(trajectory.group_id).members if trajectory.group_id else (name,)
            names = names if name in names else (name,)  # it was dropped from its group
            failures = pending.failures if pending else 0
            try:
                members = tuple(self._store.trajectories.read(one) for one in names)
            except RecordDamaged as damaged:
                self._put_off(key, failures, str(damaged), now)
                continue
            judgement = self._submit(trajectory.group_id, members)
            self._rejudged[key] = _Rejudged(members, judgement, failures)

    def _collect_rejudged(self, now: float) -> int:
        """Record finished judgements after late feedback; return how many scores changed."""
        changed = 0
        for key, pending in list(self._rejudged.items()):
            if pending.judgement is None or not pending.judgement.done():
                continue
            try:
                changed += self._record_again(key, pending, pending.judgement.result(), now)
            except RecordDamaged as damaged:  # the judge reads calls that it continues
                self._put_off(key, pending.failures, str(damaged), now)
        return changed

    def _put_off(self, key: str, failures: int, reason: str | None, now: float) -> None:
        """Try again later: a row may be mended, a judge answer again."""
        log.warning("event=rejudging_failed of=%s failures=%d reason=%r", key, failures, reason)
        self._rejudged[key] = _Rejudged((), None, failures, now + self._retry_seconds)

    def _record_again(self, key: str, pending: _Rejudged, judgement: GroupJudgement, now: float) -> int:
        if judgement.unavailable is not None:
            self._put_off(key, pending.failures, judgement.unavailable, now)
            return 0
        valued = {
            member.trajectory.id for member in pending.members if any(one.value is not None for one in member.feedback)
        }
        failed = [one for one in judgement.verdicts if one.trajectory_id in valued and one.score is None]
        if failed and pending.failures + 1 < self._attempts:
            self._put_off(key, pending.failures + 1, failed[0].failure, now)
            return 0
        if failed:
            log.warning("event=rejudging_failed of=%s failures=%d reason=%r", key, len(failed), failed[0].failure)
        changed = self._changed_scores(pending.members, judgement.verdicts)
        self._store.groups.replace_verdicts([verdict for _, verdict in changed], judgement.judge_requests)
        self._store.feedback.mark_applied([one.id for member in pending.members for one in member.feedback], now)
        self._estimator.remember([trajectory for trajectory, _ in changed], [verdict for _, verdict in changed])
        del self._rejudged[key]
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
            kept = (
                {name: getattr(before[trajectory.id], name) for name in _KEPT_FIELDS} if trajectory.id in before else {}
            )
            new = msgspec.structs.replace(verdict, explanation=note + verdict.explanation, **kept)
            changed.append((trajectory, new))
        return changed


def zero_variance_groups(store: Store, alias: str) -> list[tuple[Group, float]]:
    """Return the newest consecutive zero-variance groups with their score, as an earlier trainer left them."""
    groups = store.groups.newly_dropped(alias, DropReason.NO_VARIANCE, _MAX_ZERO_VARIANCE)
    scores = store.groups.verdicts([group.members[0] for group in groups if group.members]) if groups else {}
    return [
        (group, scores[group.members[0]].score or 0.0)
        for group in groups
        if group.members and group.members[0] in scores
    ]


# Judging again: a second judge that checks the first, and scores with a changed judge.

# The second judge: judges a sample of the groups beside the first judge, never in its place.
#
# Promises: its verdicts are never scores. They are compared with the first judge's, and only the figures are kept; its
# requests to a language model are kept for `ratchet judge show`. It blocks nobody: it works in its own threads, and
# skips groups while its queue is full. The sample depends only on the groups' ids. Its figures survive a restart.


SECOND_JUDGE = "second_judge"  # of its observations, and the name of the check
_METRIC = "ratchet_second_judge_tau"
_MIN_GROUPS = 20
_MIN_AGREEMENT = 0.2  # Kendall's tau
_MAX_COMPARED = 200  # groups
_MAX_QUEUED_SECOND = 8  # groups that wait beside those that the judge has


@dataclass(frozen=True, slots=True)
class PairedJudgements:
    """The scores of both judges for the members of one group, in order; `second` is None if the second judge failed."""

    group_id: str
    first: Sequence[float]
    second: Sequence[float] | None


class SecondJudge:
    """Judges a sample of an alias's groups. `first_version` is the version of the judge it is compared with."""

    def __init__(self, judge: Judge, sample_rate: float, store: Store, alias: str, first_version: str) -> None:
        self._judge = judge
        self._sample_rate = sample_rate
        self._store = store
        self._alias = alias
        self._versions: dict[str, Any] = {"judge": judge.version, "first_judge": first_version}
        self._threads = ThreadPoolExecutor(judge.concurrency, thread_name_prefix="second-judge")
        self._pending: dict[str, tuple[Sequence[float], Future[GroupJudgement]]] = {}  # with the first's scores
        self._compared: deque[PairedJudgements] = deque(self._load(), maxlen=_MAX_COMPARED)
        self.name = judge.name

    def submit(self, group_id: str, members: Sequence[Transcript], verdicts: Sequence[Verdict]) -> None:
        """Judge a group of the sample that the first judge scored whole, unless the queue is full."""
        first, full = _scores(verdicts), len(self._pending) >= self._judge.concurrency + _MAX_QUEUED_SECOND
        if first is not None and len(members) > 1 and not full and in_sample(group_id, self._sample_rate):
            self._pending[group_id] = first, self._threads.submit(self._judge.judge, group_id, members)

    def paired_judgements(self) -> tuple[PairedJudgements, ...]:
        """Return the verdicts of both judges on the newest groups, oldest first; records those that are new."""
        for group_id in [name for name, (_, judgement) in self._pending.items() if judgement.done()]:
            first, judgement = self._pending.pop(group_id)
            self._store.groups.record_judge_requests(judgement.result().judge_requests)
            paired = PairedJudgements(group_id, first, _scores(judgement.result().verdicts))
            scores = {"first": paired.first, "second": paired.second}
            self._store.observations.add(self._alias, SECOND_JUDGE, group_id, self._versions | scores)
            self._compared.append(paired)
        return tuple(self._compared)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._judge.close()

    def _load(self) -> list[PairedJudgements]:
        known = self._store.observations.newest(self._alias, SECOND_JUDGE, 2 * _MAX_COMPARED)
        return [
            PairedJudgements(one.subject, one.content["first"], one.content["second"])
            for one in known
            if self._versions.items() <= one.content.items()
        ]


def in_sample(group_id: str, sample_rate: float) -> bool:
    """Whether a group is in the sample. The sample of a higher rate contains that of a lower one."""
    return int.from_bytes(hashlib.sha256(group_id.encode()).digest()[:8]) < sample_rate * 2**64


def agreement(paired: Sequence[PairedJudgements], judge: str) -> list[Finding]:
    """Return Kendall's tau-b between the two judges over the newest groups; nothing before it is defined."""
    both = [(one.first, one.second) for one in paired if one.second is not None]
    if len(paired) >= _MIN_GROUPS and 2 * len(both) < len(paired):
        failed = f"second judge {judge} failed on {len(paired) - len(both)} of the last {len(paired)} groups"
        return [Finding(SECOND_JUDGE, "", "", 0.0, failed)]
    pairs = ((one, other) for first, second in both for one, other in combinations(zip(first, second, strict=True), 2))
    tau = kendall_tau_b((a - b, c - d) for (a, c), (b, d) in pairs)
    if tau is None:
        return []
    reason = None
    if len(both) >= _MIN_GROUPS and tau < _MIN_AGREEMENT:
        reason = (
            f"second judge {judge} ranks the members of the last {len(both)} groups differently (Kendall's tau "
            f"{tau:+.2f}, below {_MIN_AGREEMENT:g}; newest group {paired[-1].group_id}): one of "
            "the two judges is wrong; compare them with `ratchet judge calibrate`"
        )
    return [Finding(SECOND_JUDGE, _METRIC, "", tau, reason, blocks_release=reason is not None)]


def _scores(verdicts: Sequence[Verdict]) -> list[float] | None:
    """Return the scores in order; None if one failed."""
    scores = [verdict.score for verdict in verdicts if verdict.score is not None]
    return scores if len(scores) == len(verdicts) else None
