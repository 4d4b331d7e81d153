"""Judging again: a second judge that checks the first, and scores with a changed judge."""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import KW_ONLY, dataclass

import msgspec

from ratchet.store.errors import RecordDamaged
from ratchet.store.operation_records import Observation
from ratchet.store.records import Trajectory, Transcript, Verdict
from ratchet.store.store import Store
from ratchet.trainer.advantages import AdvantageEstimator
from ratchet.trainer.judges.judgement import GroupJudgement, Judge
from ratchet.trainer.observability.metrics import Finding
from ratchet.trainer.statistics import kendall_tau_b, score_differences

# The second judge: judges a sample of the groups beside the first judge, never in its place.
#
# Promises: its verdicts are never scores. They are compared with the first judge's, and only the figures are kept; its
# requests to a language model are kept for `ratchet judge show`. It blocks nobody: it works in its own threads, and
# skips groups while its queue is full. The sample depends only on the groups' ids. Its figures survive a restart.

log = logging.getLogger(__name__)

KIND = "second_judge"  # of its observations, and the name of the check
_METRIC = "ratchet_second_judge_tau"
_MIN_GROUPS = 20
_MIN_AGREEMENT = 0.2  # Kendall's tau
_MAX_COMPARED = 200  # groups
_MAX_QUEUED = 8  # groups that wait beside those that the judge has


@dataclass(frozen=True, slots=True)
class PairedJudgements:
    """The verdicts of both judges on one group, scores by trajectory; `second` is None if the second judge failed."""

    group_id: str
    first: Mapping[str, float]
    second: Mapping[str, float] | None


class SecondJudge:
    """Judges a sample of an alias's groups. `first_version` is the version of the judge it is compared with."""

    def __init__(self, judge: Judge, sample_rate: float, store: Store, alias: str, first_version: str) -> None:
        self._judge = judge
        self._sample_rate = sample_rate
        self._store = store
        self._alias = alias
        self._versions = {"judge": judge.version, "first_judge": first_version}
        self._threads = ThreadPoolExecutor(judge.concurrency, thread_name_prefix="second-judge")
        self._pending: dict[str, Future[GroupJudgement]] = {}
        self._first: dict[str, Mapping[str, float]] = {}
        self._compared: deque[PairedJudgements] = deque(self._load(), maxlen=_MAX_COMPARED)
        self.name = judge.name

    def offer(self, group_id: str, members: Sequence[Transcript]) -> None:
        full = len(self._pending) >= self._judge.concurrency + _MAX_QUEUED
        if len(members) > 1 and not full and group_id not in self._pending and in_sample(group_id, self._sample_rate):
            self._pending[group_id] = self._threads.submit(self._judge.judge, group_id, members)

    def compare(self, group_id: str, verdicts: Sequence[Verdict]) -> None:
        """Add the first judge's verdicts; if they hold a failure, there is nothing to compare with."""
        if group_id not in self._pending:
            return
        scores = _scores(verdicts)
        if scores is None:
            self._pending.pop(group_id).cancel()
        else:
            self._first[group_id] = scores

    def paired_judgements(self) -> tuple[PairedJudgements, ...]:
        """Return the verdicts of both judges on the newest groups, oldest first; records those that are new."""
        for group_id in [name for name in self._first if self._pending[name].done()]:
            judgement = self._pending.pop(group_id).result()
            self._store.groups.record_judge_requests(judgement.judge_requests)
            paired = PairedJudgements(group_id, self._first.pop(group_id), _scores(judgement.verdicts))
            self._store.observations.add(self._alias, KIND, group_id, {**self._versions, **_figures(paired)})
            self._compared.append(paired)
        return tuple(self._compared)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._judge.close()

    def _load(self) -> list[PairedJudgements]:
        known = self._store.observations.newest(self._alias, KIND, 2 * _MAX_COMPARED)
        return [_paired(one) for one in known if self._versions.items() <= one.content.items()]


def in_sample(group_id: str, sample_rate: float) -> bool:
    """Whether a group is in the sample. The sample of a higher rate contains that of a lower one."""
    return int.from_bytes(hashlib.sha256(group_id.encode()).digest()[:8]) < sample_rate * 2**64


def agreement(paired: Sequence[PairedJudgements], judge: str) -> list[Finding]:
    """Return Kendall's tau-b between the two judges over the newest groups; nothing before it is defined."""
    both = [(one.first, one.second) for one in paired if one.second is not None]
    if len(paired) >= _MIN_GROUPS and 2 * len(both) < len(paired):
        failed = f"second judge {judge} failed on {len(paired) - len(both)} of the last {len(paired)} groups"
        return [Finding(KIND, "", "", 0.0, failed)]
    tau = kendall_tau_b([pair for first, second in both for pair in score_differences(first, second)])
    if tau is None:
        return []
    reason = None
    if len(both) >= _MIN_GROUPS and tau < _MIN_AGREEMENT:
        reason = (
            f"second judge {judge} ranks the members of the last {len(both)} groups differently (Kendall's tau "
            f"{tau:+.2f}, below {_MIN_AGREEMENT:g}; newest group {paired[-1].group_id}): one of "
            "the two judges is wrong; compare them with `ratchet judge calibrate`"
        )
    return [Finding(KIND, _METRIC, "", tau, reason, blocks_release=reason is not None)]


def _figures(paired: PairedJudgements) -> dict[str, list[float] | None]:
    """Return both judges' scores by position, without the trajectories' ids."""
    second = None if paired.second is None else [paired.second[name] for name in paired.first]
    return {"first": list(paired.first.values()), "second": second}


def _paired(noted: Observation) -> PairedJudgements:
    first, second = (
        None if scores is None else {str(place): score for place, score in enumerate(scores)}
        for scores in (noted.content["first"], noted.content["second"])
    )
    return PairedJudgements(noted.subject, first or {}, second)


def _scores(verdicts: Sequence[Verdict]) -> dict[str, float] | None:
    """Return the scores by trajectory; None if one failed."""
    scores = {verdict.trajectory_id: verdict.score for verdict in verdicts if verdict.score is not None}
    return scores if len(scores) == len(verdicts) else None


# Rejudger: judges trajectories again after late feedback.
#
# Promises: verdicts are only added; no state changes, so nothing is trained twice; for a trajectory that was trained
# already, the log and the new verdict name the versions it trained. A group is judged again as a whole, since scores
# may be relative; only changed scores are recorded. Retries of a failing judge are bounded; one that is away is waited
# for.

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
        return [feedback.id for member in self.members for feedback in member.feedback]


@dataclass
class Rejudger:
    """Judges the trajectories of one alias again."""

    store: Store
    alias: str
    submit_judge: SubmitJudge
    estimator: AdvantageEstimator
    _: KW_ONLY
    attempts: int
    retry_seconds: float

    def __post_init__(self) -> None:
        self._pending: dict[str, _PendingRejudging] = {}

    def submit_late_feedback(self, now: float) -> None:
        """Queue everything that got feedback after its verdict."""
        for name in self.store.feedback.applied_too_late(self.alias, limit=_MAX_PENDING):
            trajectory = self.store.trajectories.get(name)
            key = trajectory.group_id or name
            pending = self._pending.get(key)
            if pending is not None and (pending.judgement is not None or now < pending.due_at):
                continue
            names = self.store.groups.get(trajectory.group_id).members if trajectory.group_id else (name,)
            names = names if name in names else (name,)  # it was dropped from its group
            failures = pending.failures if pending else 0
            try:
                members = tuple(self.store.trajectories.read(one) for one in names)
            except RecordDamaged as damaged:
                self._put_off(key, failures, damaged, now)
                continue
            judgement = self.submit_judge(trajectory.group_id, members)
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
        self._pending[key] = _PendingRejudging((), None, failures, now + self.retry_seconds)

    def _record(self, key: str, pending: _PendingRejudging, judgement: GroupJudgement, now: float) -> int:
        if judgement.unavailable is not None:
            log.warning("event=rejudging_waits of=%s reason=%r", key, judgement.unavailable)
            self._pending[key] = _PendingRejudging((), None, pending.failures, now + self.retry_seconds)
            return 0
        valued = {
            member.trajectory.id for member in pending.members if any(one.value is not None for one in member.feedback)
        }
        failed = [one for one in judgement.verdicts if one.trajectory_id in valued and one.score is None]
        if failed and pending.failures + 1 < self.attempts:
            self._pending[key] = _PendingRejudging((), None, pending.failures + 1, now + self.retry_seconds)
            return 0
        if failed:
            log.warning("event=rejudging_failed of=%s failures=%d reason=%r", key, len(failed), failed[0].failure)
        changed = self._changed_scores(pending.members, judgement.verdicts)
        self.store.groups.replace_verdicts([verdict for _, verdict in changed], judgement.judge_requests)
        self.store.feedback.mark_applied(pending.feedback_ids, now)
        self.estimator.remember([trajectory for trajectory, _ in changed], [verdict for _, verdict in changed])
        del self._pending[key]
        return len(changed)

    def _changed_scores(
        self, members: Sequence[Transcript], verdicts: Sequence[Verdict]
    ) -> list[tuple[Trajectory, Verdict]]:
        """Return the verdicts whose score differs from the earlier one, with a note of what the earlier one trained."""
        names = [member.trajectory.id for member in members]
        before, trained = self.store.groups.verdicts(names), self.store.lineage.versions_of(names)
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
