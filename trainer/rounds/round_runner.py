"""Runs training rounds, and makes the next one smaller after one ran out of memory."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec

from ratchet.store.calls.trajectory_filter import TrajectoryFilter
from ratchet.store.errors import RecordDamaged
from ratchet.store.reasons import DropReason, describe_untrained
from ratchet.store.records import (
    BASE_VERSION,
    Group,
    Policy,
    Round,
    TeacherScore,
    Trajectory,
    Transcript,
    Verdict,
    unpack_logprobs,
)
from ratchet.store.reports.learning_report import describe_collapse, movement_of
from ratchet.store.states import RoundState
from ratchet.store.store import Store
from ratchet.trainer.adapters.adapter_store import AdapterStore, is_remote, number_of
from ratchet.trainer.advantages import AdvantageEstimator, JudgedGroup, MemberAdvantages
from ratchet.trainer.collect.collector import RoleResolver
from ratchet.trainer.errors import (
    CheckpointDamaged,
    NoLearningSignal,
    OutOfMemory,
    RowError,
    TrainerError,
    TrainingDiverged,
)
from ratchet.trainer.judges.judge_runner import TranscriptCache
from ratchet.trainer.learner_api import LearnerProtocol, RoundReport
from ratchet.trainer.rounds.backlog import RoundSize, age
from ratchet.trainer.rows.build_rows import ALL_ROLES, AnswerKey, Rows, build_rows
from ratchet.trainer.rows.token_row import ROWS, Roles, TokenRow, contexts
from ratchet.trainer.rows.trajectory_export import AnswerRecords
from ratchet.trainer.settings.learner_settings import LearnerSettings

# MemoryLimit: makes the next round smaller after one ran out of memory, so that no row can block training for ever.
#
#     out-of-memory rounds in a row     the next round is trained with
#     -----------------------------     ----------------------------------------------------------
#     1                                 micro-batches of a quarter of `token_budget`
#     2                                 one row per micro-batch
#     3                                 one row per micro-batch, without the longest row
#     4                                 one row per micro-batch, without rows above three quarters of the longest
#     5                                 nothing: the trainer stops, and its groups wait
#
# Promises: the count survives a restart, because the store has the rounds and why they were abandoned; a size that fits
# is kept until the next start; after a restart rows of any length are tried again, in case other processes had used the
# memory. Rows that are left out are counted; a trajectory without another row is dropped.

_SINGLE_ROWS, _WITHOUT_MAX_LENGTH, _WITHOUT_LONG = 2, 3, 4  # failures in a row
_BUDGET_DIVISOR = 4
_LONG = 0.75  # of the longest row
_ROUNDS_READ = 20


class MemoryLimit:
    """The learner settings and the row length of the next round, after out-of-memory rounds."""

    def __init__(self, store: Store, alias: str, learner: LearnerSettings) -> None:
        self._settings = learner
        self._failures = min(_failed_rounds(store, alias), _WITHOUT_LONG)
        self._max_row_length = learner.max_length

    @property
    def is_reduced(self) -> bool:
        return self._failures > 0

    @property
    def learner_settings(self) -> LearnerSettings:
        if not self._failures:
            return self._settings
        budget = self._settings.token_budget // _BUDGET_DIVISOR if self._failures < _SINGLE_ROWS else 1
        return replace(self._settings, token_budget=max(1, budget))

    def max_row_length(self, lengths: Sequence[int]) -> int | None:
        """Return the largest row length in tokens for the next round, given its row lengths; None if unlimited.

        Raises OutOfMemory if no row would be left.
        """
        if self._failures >= _WITHOUT_MAX_LENGTH and lengths:
            length = max(lengths)
            limit = length - 1 if self._failures == _WITHOUT_MAX_LENGTH else int(_LONG * length)
            if limit < min(lengths):
                raise OutOfMemory(
                    f"none of the {len(lengths)} rows fits into memory, the shortest has {min(lengths)} tokens: "
                    "set learner.gradient_checkpointing, or give the trainer more memory"
                )
            self._max_row_length = limit if self._max_row_length is None else min(self._max_row_length, limit)
        return self._max_row_length

    def record_failure(self) -> bool:
        """Count an out-of-memory round; return whether to try a smaller one."""
        self._failures += 1
        return self._failures <= _WITHOUT_LONG

    def record_success(self) -> None:
        """Keep the size of the committed round."""
        self._failures = min(self._failures, _SINGLE_ROWS)


def _failed_rounds(store: Store, alias: str) -> int:
    """Return the number of out-of-memory rounds since the last commit."""
    since = takewhile(lambda one: one.state is not RoundState.COMMITTED, store.rounds.page(alias, _ROUNDS_READ))
    return sum(OutOfMemory.__name__ in (one.reason or "") for one in since)


# RoundRunner: one training round, from judged groups to a committed checkpoint and a candidate version.
#
# Promises: the trajectories are consumed in the transaction that records the checkpoint. If a round ends before that,
# its groups wait for another one, and the learner restarts from the last committed checkpoint: nothing is trained
# twice. Does not choose when a round starts, and does not publish.

log = logging.getLogger(__name__)

ROUND_ABORTED = "round_aborted"  # alarm
COLLAPSE = "collapse"  # alarm
_KEPT_CONTEXTS = 4  # rounds whose contexts for the proof are kept
_AFTER_VERDICT = "after_verdict"  # reason for untrained tokens


class RoundRunner:
    """Runs the training rounds of one alias."""

    def __init__(
        self,
        store: Store,
        alias: str,
        versions: str | Path,
        estimator: AdvantageEstimator | None = None,
        transcripts: TranscriptCache | None = None,
        role_resolver: RoleResolver | None = None,
        size: RoundSize | None = None,
        memory: MemoryLimit | None = None,
        mask_truncated: bool = False,
        penalized: bool = False,
        adapters: AdapterStore | None = None,
    ) -> None:
        """Keep the alias's versions under the folder or URL `versions`."""
        self._store = store
        self._alias = alias
        self._versions = str(versions)
        self._adapters = adapters or AdapterStore(Path(self._versions))
        self._estimator = estimator or AdvantageEstimator()
        self._transcripts = transcripts or TranscriptCache(store)
        self._role_resolver = role_resolver or RoleResolver(store, alias, Roles())
        self._size = size or RoundSize(1, 1)
        self._memory = memory or MemoryLimit(store, alias, LearnerSettings())
        self._mask_truncated = mask_truncated
        self._penalized = penalized
        self._known_complete: set[str] = set()
        self._contexts: dict[str, list[tuple[int, ...]]] = {}  # of the newest committed rounds, by round

    def newest_commit(self) -> tuple[int, str | None]:
        """Return (version, its reference) of the newest version that is not rejected, else (0, None).

        The store decides, not the newest folder. Raises CheckpointDamaged if that version is incomplete,
        AdapterStoreUnreachable, CheckpointError.
        """
        newest = self._store.rounds.newest_committed(self._alias)
        if newest is None or newest.checkpoint is None or newest.to_version is None:
            return BASE_VERSION, None
        if newest.checkpoint not in self._known_complete:
            if not self._adapters.complete(newest.checkpoint):
                raise CheckpointDamaged(
                    f"{newest.checkpoint}, the newest version of {self._alias}, is missing or incomplete: "
                    "restore it, or roll back to an older version"
                )
            if is_remote(newest.checkpoint):  # a local folder is looked at each time, which costs nothing
                self._known_complete = {newest.checkpoint}
        return newest.to_version, newest.checkpoint

    @property
    def has_commits(self) -> bool:
        """Whether a version was ever committed, rejected ones included."""
        return any(policy.round_id is not None for policy in self._store.policies.all(self._alias))

    def adopt_initial(self, learner: LearnerProtocol, adapter: str) -> Policy:
        """Commit what a new learner holds, the weights of an existing `adapter`, as a candidate; return it."""
        reference = self.next_reference()
        learner.save(reference)
        reason = f"init_adapter {adapter}"
        candidate = self._store.rounds.adopt(
            self._alias,
            version=number_of(reference),
            checkpoint=reference,
            origin={"init_adapter": adapter},
            reason=reason,
            by_trainer=True,
        )
        log.info("event=init_adapter_committed policy=%s adapter=%s", candidate.served_name, adapter)
        return candidate

    def rows(
        self,
        member: Transcript,
        verdict: Verdict,
        advantages: MemberAdvantages,
        teacher: TeacherScore | None = None,
    ) -> Rows:
        """Return the rows of a judged trajectory, without calls that the judge did not see. With distillation the
        advantages come from what the `teacher` said.
        """
        calls = self._role_resolver.with_roles(self._store.trajectories.context_calls(member))
        judged = [call for call in calls if call.ended_at is not None and call.ended_at <= verdict.judged_at]
        late = sum(call.completion_tokens for call in calls if call not in judged)
        try:
            rows = build_rows(
                member.trajectory.id, judged, advantages.whole, self._role_resolver.roles, advantages.by_role,
                by_turn=advantages.by_turn, mask_truncated=self._mask_truncated, penalized=self._penalized,
                teacher=_by_answer(teacher) if self._estimator.distilled else None,
            )  # fmt: skip
        except RowError as error:
            log.warning("event=row_refused trajectory=%s reason=%r", member.trajectory.id, str(error))
            rows = Rows((), {"invalid_row": sum(call.completion_tokens for call in judged)})
        if not late:
            return rows
        unseen = {(call.id, one.index): _AFTER_VERDICT for call in calls if call not in judged for one in call.choices}
        return dataclasses.replace(
            rows,
            untrained={**rows.untrained, _AFTER_VERDICT: late},
            untrained_answers={**rows.untrained_answers, **unseen},
        )

    def run_round(
        self,
        learner: LearnerProtocol,
        groups: Sequence[Group],
        from_version: int,
    ) -> Policy | None:
        """Train on the groups and commit. Returns None if no token could be trained; the groups are dropped then.

        Raises TrainingDiverged if the gradient is not finite; the groups are dropped. Any other exception aborts the
        round with an alarm, and the groups wait for another one. The learner needs a reload unless a policy is
        returned.
        """
        reference = self.next_reference()  # first: a store that is away costs no step and no abandoned round
        started = self._store.rounds.start(self._alias, from_version)
        untrained: Counter[str] = Counter()
        answers = AnswerRecords()
        try:
            members = self._transcripts.pop([name for group in groups for name in group.members])
            judged = self._with_advantages(groups, {one.trajectory.id: one.trajectory for one in members})
            rows = self._build_rows(learner, members, judged, from_version, untrained, answers)
            rows, groups = self._drop_too_long(rows, groups, untrained, answers)
            scale = self._size.rate_scale(_groups_with_rows(groups, rows))
            probes = contexts(rows)
            report = learner.train_round(rows, scale)
            reward = _reward(judged, groups)
            metrics = {"groups": len(groups), "rate_scale": scale, "untrained_tokens": dict(untrained), **reward}
            candidate = self.commit(learner, started, reference, groups, report.figures() | metrics)
        except NoLearningSignal as error:
            self._drop_groups(started, groups, DropReason.UNTRAINABLE, f"{error}; {describe_untrained(untrained)}")
            return None
        except TrainingDiverged as error:
            self._drop_groups(started, groups, DropReason.DIVERGED, str(error))
            raise
        except (TrainerError, RecordDamaged) as error:
            self._abort(started, f"{type(error).__name__}: {error}")
            raise
        self._store.answer_training.record(started.id, answers.of_round(rows, report.mismatch))
        self._memory.record_success()
        kept = list(self._contexts.items())[1 - _KEPT_CONTEXTS :]
        self._contexts = dict(kept) | {started.id: probes}  # spares the proof to read them again
        self._report_commit(started, candidate, report, len(groups), reward["reward"])
        return candidate

    def _with_advantages(self, groups: Sequence[Group], members: Mapping[str, Trajectory]) -> list[JudgedGroup]:
        """Return the groups with the advantages of their current verdicts, which feedback may have changed."""
        verdicts = self._store.groups.verdicts(list(members))
        return [
            self._estimator.estimate(
                group, [members[name] for name in group.members], [verdicts[name] for name in group.members]
            )
            for group in groups
        ]

    def commit(
        self,
        learner: LearnerProtocol,
        started: Round,
        reference: str,
        groups: Sequence[Group],
        metrics: Mapping[str, Any],
        demonstrations: Sequence[str] = (),
    ) -> Policy:
        """Publish the learner's state under a new reference and commit the round. `demonstrations` are the
        trajectories of a warm start.
        """
        learner.save(reference)
        return self._store.rounds.commit(
            started.id,
            version=number_of(reference),
            checkpoint=reference,
            groups=[group.id for group in groups],
            metrics=metrics,
            demonstrations=demonstrations,
        )

    def next_reference(self) -> str:
        """Return the reference of the next version: a number that is new to the store and to the adapter store."""
        return self._adapters.next_reference(self._versions, self._store.rounds.next_version(self._alias))

    def probes(self, candidate: Policy) -> list[tuple[int, ...]]:
        """Return contexts in which the candidate was trained, to prove that vLLM serves it.

        A warm start consumes no trajectory; its contexts come from recent traffic. Those of a forked version are the
        ones of the version that it is a copy of, which may have other roles.
        """
        if (known := self._contexts.get(candidate.round_id or "")) is not None:
            return known
        source = candidate.evidence.get("origin", {}).get("forked_from")
        rows: list[TokenRow] = []
        roles = self._role_resolver.roles if source is None else ALL_ROLES
        for transcript in self._store.trajectories.readable(self._probe_trajectories(candidate, source)):
            with suppress(RecordDamaged):
                calls = self._role_resolver.with_roles(self._store.trajectories.context_calls(transcript))
                rows += build_rows(transcript.trajectory.id, calls, 0.0, roles, imitated=True).rows
            if len(rows) >= ROWS:
                break
        return contexts(rows)

    def can_be_proven(self, candidate: Policy) -> bool:
        """Return whether there are contexts for the proof of an adopted candidate; a new agent has none before its
        first calls.
        """
        adopted = "origin" in candidate.evidence and candidate.served_name == f"{self._alias}@{candidate.version}"
        return not adopted or bool(self.probes(candidate))

    def _probe_trajectories(self, candidate: Policy, source: Mapping[str, Any] | None) -> list[str]:
        trained_in_round = self._store.trajectories.trained_in_round
        names = trained_in_round(candidate.round_id or "", 2 * ROWS)
        if source is not None:
            copied = self._store.policies.get(source["alias"], source["version"])
            names = trained_in_round(copied.round_id or "", 2 * ROWS) or self._newest(copied.alias)
        return names or self._newest(self._alias)

    def _build_rows(
        self,
        learner: LearnerProtocol,
        members: Sequence[Transcript],
        judged: Sequence[JudgedGroup],
        version: int,
        untrained: Counter[str],
        answers: AnswerRecords,
    ) -> list[TokenRow]:
        """Return the rows of all members, in the order of `judged`; counts the tokens that are not trained."""
        rows: list[TokenRow] = []
        policies = self._store.policies.all(self._alias)
        names = [member.trajectory.id for member in members]
        teacher = self._store.groups.teacher_scores(names) if self._estimator.distilled else {}
        advantages = self._estimator.scale_over_round(judged)
        verdicts = ((group.group, verdict) for group in judged for verdict in group.verdicts)
        for member, (group, verdict), earned in zip(members, verdicts, advantages, strict=True):
            built = self.rows(member, verdict, earned, teacher.get(member.trajectory.id))
            untrained.update(built.untrained)
            answers.add(built)
            for row in built.rows:
                unfit = learner.unfit(row)
                if unfit is None:
                    old = age(policies, member.trajectory.version, version)
                    rows.append(dataclasses.replace(row, group=_row_group(member.trajectory, group), age=old))
                else:
                    untrained["exceeds_model"] += row.tokens_trained
                    answers.leave_out(row, "exceeds_model")
                    log.warning("event=row_refused reason=%r", unfit)
        return rows

    def _drop_too_long(
        self, rows: Sequence[TokenRow], groups: Sequence[Group], untrained: Counter[str], answers: AnswerRecords
    ) -> tuple[list[TokenRow], Sequence[Group]]:
        """Leave out rows that are too long, and drop trajectories without another row. Raises OutOfMemory."""
        alarm = f"{DropReason.TOO_LONG}:{self._alias}"
        max_length = self._memory.max_row_length([len(row.ids) for row in rows])
        kept = [row for row in rows if max_length is None or len(row.ids) <= max_length]
        if len(kept) == len(rows):
            self._store.alarms.clear(alarm)
            return kept, groups
        trained = {row.trajectory_id for row in kept}
        dropped = {row.trajectory_id for row in rows} - trained
        for row in rows:
            if row.trajectory_id in dropped or len(row.ids) > (max_length or 0):
                untrained["too_long"] += row.tokens_trained
                answers.leave_out(row, "too_long")
        self._store.groups.drop_members(sorted(dropped), DropReason.TOO_LONG)
        self._store.alarms.raise_(
            alarm,
            f"{len(rows) - len(kept)} rows of more than {max_length} tokens were left out, and {len(dropped)} "
            "trajectories without another row were dropped: raise learner.max_length if it is set, else set "
            "learner.gradient_checkpointing or give the trainer more memory",
        )
        return kept, list(_without(groups, dropped))

    def _newest(self, alias: str) -> list[str]:
        """Return the ids of some of an alias's newest trajectories."""
        return [one.id for one in self._store.trajectories.page(2 * ROWS, chosen=TrajectoryFilter(alias=alias))]

    def _drop_groups(self, started: Round, groups: Sequence[Group], reason: DropReason, detail: str) -> None:
        self._store.rounds.abandon(started.id, detail)
        for group in groups:
            self._store.groups.drop(group.id, reason)
        self._store.alarms.raise_(f"{reason}:{self._alias}", f"round {started.id}: {detail}")

    def _abort(self, started: Round, detail: str) -> None:
        """Abandon a round that another attempt may complete; its groups wait."""
        self._store.rounds.abandon(started.id, detail)
        self._store.alarms.raise_(f"{ROUND_ABORTED}:{self._alias}", f"round {started.id} was aborted: {detail}")

    def _report_commit(
        self, started: Round, candidate: Policy, report: RoundReport, groups: int, reward: float
    ) -> None:
        names = (DropReason.UNTRAINABLE, DropReason.DIVERGED, ROUND_ABORTED)
        self._store.alarms.clear(*(f"{name}:{self._alias}" for name in names))
        self._check_collapse(candidate, report)
        log.info(
            "event=round_committed round=%s policy=%s@%d groups=%d rows=%d tokens=%d reward=%.3f loss=%.4f "
            "max_mismatch_nats=%.5f moved_nats=%.2g rate=%.2g seconds=%.1f",
            started.id, self._alias, candidate.version, groups, report.rows, report.tokens_trained,
            reward, report.loss, report.logprob_abs_diff_mean, report.approx_kl, report.learning_rate, report.seconds,
        )  # fmt: skip

    def _check_collapse(self, candidate: Policy, report: RoundReport) -> None:
        alarm = f"{COLLAPSE}:{self._alias}"
        movement = movement_of(report.figures())
        if movement is not None and movement.collapsing:
            self._store.alarms.raise_(alarm, f"{self._alias}@{candidate.version}: {describe_collapse(movement)}")
        else:
            self._store.alarms.clear(alarm)


def _by_answer(teacher: TeacherScore | None) -> dict[AnswerKey, tuple[float, ...]]:
    answers = teacher.answers if teacher is not None else ()
    return {(one.call_id, one.choice): unpack_logprobs(one.logprobs) for one in answers}


def _reward(judged: Sequence[JudgedGroup], groups: Sequence[Group]) -> dict[str, float]:
    """Return the mean score and the number of the trajectories that are still in `groups`."""
    names = {name for group in groups for name in group.members}
    scores = [one.score or 0.0 for group in judged for one in group.verdicts if one.trajectory_id in names]
    return {"reward": sum(scores) / len(scores) if scores else 0.0, "trajectories": len(names)}


def _groups_with_rows(groups: Sequence[Group], rows: Sequence[TokenRow]) -> list[Group]:
    trained = {row.trajectory_id for row in rows}
    return [group for group in groups if not trained.isdisjoint(group.members)]


def _without(groups: Sequence[Group], dropped: set[str]) -> Iterator[Group]:
    """Yield the groups without the dropped members, if any member is left."""
    for group in groups:
        members = tuple(name for name in group.members if name not in dropped)
        if members:
            yield msgspec.structs.replace(group, members=members)


def _row_group(trajectory: Trajectory, group: Group) -> str:
    """Return the key that the rows of attempts at one task share: their group's id, in a cohort one of their own."""
    return group.id if group.key == trajectory.group_key else f"{group.id}:{trajectory.id}"
