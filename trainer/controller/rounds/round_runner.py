"""One round of school: judged groups in, a committed checkpoint and a candidate version out.

Promises: the trajectories are consumed in the transaction that records the checkpoint; whatever stops a round before
that leaves them waiting, and the learner then goes on from the last committed checkpoint, so nothing is trained
twice. Does not choose when a round begins and does not publish.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from ratchet.store.calls.trajectory_filter import TrajectoryFilter
from ratchet.store.reasons import DropReason, describe_untrained
from ratchet.store.records import BASE_VERSION, Group, Policy, Round, Trajectory, Transcript, Verdict
from ratchet.store.reports.policy_movement import describe_collapse, movement_of
from ratchet.store.store import Store
from ratchet.trainer.adapters import checkpoint
from ratchet.trainer.controller.advantages.estimator import AdvantageEstimator
from ratchet.trainer.controller.advantages.turn_advantages import Turns
from ratchet.trainer.controller.collect.role_resolution import RoleResolver
from ratchet.trainer.controller.judging.transcript_cache import Transcripts
from ratchet.trainer.controller.rounds.memory_limit import Memory
from ratchet.trainer.controller.rounds.round_size import RoundSize
from ratchet.trainer.controller.rounds.staleness import age
from ratchet.trainer.errors import CheckpointDamaged, NoLearningSignal, RowError, TrainerError, TrainingDiverged
from ratchet.trainer.learner_protocol import LearnerProtocol, RoundReport
from ratchet.trainer.rows.build_rows import Rows, build_rows
from ratchet.trainer.rows.probes import ROWS, contexts
from ratchet.trainer.rows.roles import Roles
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import LearnerSettings

log = logging.getLogger(__name__)

AdvantagesByRole = Mapping[
    str | None, float
]  # a trajectory's advantage (of no role by name), and those of roles by name

UNFINISHED = "unfinished"
COLLAPSE = "collapse"


class RoundRunner:
    """Runs the rounds of one alias."""

    def __init__(
        self,
        store: Store,
        alias: str,
        checkpoints: Path,
        credit: AdvantageEstimator,
        transcripts: Transcripts | None = None,
        casting: RoleResolver | None = None,
        size: RoundSize | None = None,
        memory: Memory | None = None,
        mask_truncated: bool = False,
    ) -> None:
        self._mask_truncated = mask_truncated
        self._memory = memory or Memory(store, alias, LearnerSettings())
        self._size = size or RoundSize(1, 1)
        self._role_resolver = casting or RoleResolver(store, alias, Roles())
        self._store = store
        self._transcripts = transcripts or Transcripts(store)
        self._alias = alias
        self._checkpoints = checkpoints
        self._credit = credit

    def newest(self) -> tuple[int, Path | None]:
        """Return (version, checkpoint) where training goes on: the newest that is not rejected, else (0, None).

        The store decides, not the newest folder. Raises CheckpointDamaged when that checkpoint is not whole.
        """
        done = self._store.rounds.newest_committed(self._alias)
        if done is None or done.checkpoint is None or done.to_version is None:
            return BASE_VERSION, None
        folder = Path(done.checkpoint)
        if not checkpoint.complete(folder):
            raise CheckpointDamaged(f"{folder}, the newest checkpoint of {self._alias}, is missing or not whole")
        return done.to_version, folder

    def rows(
        self, member: Transcript, verdict: Verdict, earned: AdvantagesByRole, turns: Turns = MappingProxyType({})
    ) -> Rows:
        """Return the rows of a judged trajectory, without what the judge has not seen."""
        calls = self._role_resolver.named(self._store.trajectories.context_calls(member))
        seen = [call for call in calls if call.ended_at is not None and call.ended_at <= verdict.judged_at]
        late = sum(call.completion_tokens for call in calls if call not in seen)
        try:
            rows = build_rows(
                member.trajectory.id, seen, earned[None], self._role_resolver.roles, earned, by_turn=turns,
                mask_truncated=self._mask_truncated,
            )  # fmt: skip
        except RowError as error:
            log.warning("event=row_refused trajectory=%s reason=%r", member.trajectory.id, str(error))
            rows = Rows((), {"invalid_row": sum(call.completion_tokens for call in seen)})
        return Rows(rows.rows, {**rows.untrained, "after_verdict": late} if late else rows.untrained)

    def run_round(self, pupil: LearnerProtocol, groups: Sequence[Group], from_version: int) -> Policy | None:
        """Train on the groups and commit; None when they held nothing to train on, and were dropped for it.

        Raises TrainingDiverged when the gradient was not finite: the groups are dropped. Whatever else it raises breaks
        the round off, with an alarm, and the groups wait for another one. The pupil is spoilt either way.
        """
        held = self._store.rounds.start(self._alias, from_version)
        try:
            rows, untrained = self._collect(pupil, groups, from_version)
            rows, groups = self._drop_too_long(rows, groups, untrained)
            scale = self._size.rate_scale(_groups_with_rows(groups, rows))
            report = pupil.train_round(rows, scale)
            metrics = {"groups": len(groups), "rate_scale": scale, "untrained_tokens": dict(untrained)}
            candidate = self.commit(pupil, held, groups, dataclasses.asdict(report) | metrics | self._reward(groups))
        except NoLearningSignal as nothing:
            self._put_aside(held, groups, DropReason.UNTRAINABLE, f"{nothing}; {describe_untrained(untrained)}")
            return None
        except TrainingDiverged as diverged:
            self._put_aside(held, groups, DropReason.DIVERGED, str(diverged))
            raise
        except TrainerError as stopped:
            self._abandon_round(held, f"{type(stopped).__name__}: {stopped}")
            raise
        self._memory.fitted()
        self._committed(held, candidate, report, groups)
        return candidate

    def commit(
        self,
        pupil: LearnerProtocol,
        held: Round,
        groups: Sequence[Group],
        metrics: Mapping[str, Any],
        shown: Sequence[str] = (),
    ) -> Policy:
        """Write the pupil's checkpoint and commit the round; `shown` are trajectories that it imitated."""
        folder = self._next_folder()
        pupil.save(folder)
        return self._store.rounds.commit(
            held.id,
            version=int(folder.name),
            checkpoint=str(folder.absolute()),
            groups=[group.id for group in groups],
            metrics=metrics,
            shown=shown,
        )

    def probes(self, candidate: Policy) -> list[tuple[int, ...]]:
        """Return contexts from which the candidate's trained tokens were sampled: where a swap must show.

        A warm start consumes no trajectory: it shows wherever the policy was asked lately.
        """
        rows: list[TokenRow] = []
        for name in self._store.trajectories.trained_in_round(candidate.round_id or "", 2 * ROWS) or self._newest():
            transcript = self._store.trajectories.read(name)
            calls = self._role_resolver.named(self._store.trajectories.context_calls(transcript))
            rows += build_rows(name, calls, 0.0, self._role_resolver.roles, imitated=True).rows
            if len(rows) >= ROWS:
                break
        return contexts(rows[:ROWS])

    def _newest(self) -> list[str]:
        """Return some of the alias's newest trajectories."""
        return [run.id for run in self._store.trajectories.page(2 * ROWS, chosen=TrajectoryFilter(alias=self._alias))]

    def _next_folder(self) -> Path:
        """Return the folder of the next version: a number that neither the store nor the disk has seen."""
        number = max(self._store.rounds.next_version(self._alias), int(checkpoint.next_path(self._checkpoints).name))
        return self._checkpoints / f"{number:04d}"

    def _put_aside(self, held: Round, groups: Sequence[Group], reason: str, words: str) -> None:
        """Abandon a round and drop its groups, loudly."""
        self._store.rounds.abandon(held.id, words)
        for group in groups:
            self._store.groups.drop(group.id, reason)
        self._store.alarms.raise_(f"{reason}:{self._alias}", f"round {held.id}: {words}")

    def _abandon_round(self, held: Round, words: str) -> None:
        """Give a round up for what another start may mend; its groups wait for another one."""
        self._store.rounds.abandon(held.id, words)
        self._store.alarms.raise_(f"{UNFINISHED}:{self._alias}", f"round {held.id} was broken off: {words}")

    def _committed(self, held: Round, candidate: Policy, report: RoundReport, groups: Sequence[Group]) -> None:
        for gone in (DropReason.UNTRAINABLE, DropReason.DIVERGED, UNFINISHED):
            self._store.alarms.clear(f"{gone}:{self._alias}")
        self._watch_for_collapse(candidate, report)
        log.info(
            "event=round_committed round=%s policy=%s@%d groups=%d rows=%d tokens=%d reward=%.3f loss=%.4f "
            "max_mismatch_nats=%.5f moved_nats=%.2g rate=%.2g seconds=%.1f",
            held.id, self._alias, candidate.version, len(groups), report.rows, report.tokens_trained,
            self._reward(groups)["reward"], report.loss, report.logprob_abs_diff_mean,
            report.approx_kl, report.learning_rate, report.seconds,
        )  # fmt: skip

    def _watch_for_collapse(self, candidate: Policy, report: RoundReport) -> None:
        alarm = f"{COLLAPSE}:{self._alias}"
        moved = movement_of(dataclasses.asdict(report))
        if moved is not None and moved.collapsing:
            self._store.alarms.raise_(alarm, f"{self._alias}@{candidate.version}: {describe_collapse(moved)}")
        else:
            self._store.alarms.clear(alarm)

    def _collect(
        self, pupil: LearnerProtocol, groups: Sequence[Group], version: int
    ) -> tuple[list[TokenRow], Counter[str]]:
        rows: list[TokenRow] = []
        untrained: Counter[str] = Counter()
        keys = {group.id: group.key for group in groups}
        policies = self._store.policies.all(self._alias)
        for member, verdict, earned, turns in self._with_advantages(groups):
            built = self.rows(member, verdict, earned, turns)
            untrained.update(built.untrained)
            for row in built.rows:
                unfit = pupil.unfit(row)
                if unfit is None:
                    old = age(policies, member.trajectory.version, version)
                    rows.append(dataclasses.replace(row, group=_alike(member.trajectory, keys), age=old))
                else:
                    untrained["exceeds_model"] += row.tokens_trained
                    log.warning("event=row_refused reason=%r", unfit)
        return rows, untrained

    def _drop_too_long(
        self, rows: Sequence[TokenRow], groups: Sequence[Group], untrained: Counter[str]
    ) -> tuple[list[TokenRow], Sequence[Group]]:
        """Leave out the rows that are too long; drop the trajectories that have no other. Raises OutOfMemory."""
        most = self._memory.longest([len(row.ids) for row in rows])
        fitting = [row for row in rows if most is None or len(row.ids) <= most]
        if len(fitting) == len(rows):
            self._store.alarms.clear(f"{DropReason.TOO_LONG}:{self._alias}")
            return fitting, groups
        left = {row.trajectory_id for row in fitting}
        aside = {row.trajectory_id for row in rows} - left
        for row in rows:
            if row.trajectory_id in aside or len(row.ids) > (most or 0):
                untrained["too_long"] += row.tokens_trained
        self._store.groups.drop_members(sorted(aside), DropReason.TOO_LONG)
        self._store.alarms.raise_(
            f"{DropReason.TOO_LONG}:{self._alias}",
            f"{len(rows) - len(fitting)} rows of more than {most} tokens were left out, and {len(aside)} trajectories "
            "that have no other row were dropped: raise learner.max_length where it is set, else set "
            "learner.gradient_checkpointing or give the trainer more memory",
        )
        kept = [msgspec.structs.replace(one, members=tuple(n for n in one.members if n not in aside)) for one in groups]
        return fitting, [group for group in kept if group.members]

    def _with_advantages(self, groups: Sequence[Group]) -> list[tuple[Transcript, Verdict, AdvantagesByRole, Turns]]:
        """Return the members of the groups with their verdicts, their advantages and those of their single calls."""
        members: list[Transcript] = []
        said: list[Verdict] = []
        turns: list[Turns] = []
        roles = (None, *self._credit.roles)
        advantages: dict[str | None, list[float]] = {role: [] for role in roles}
        for group in groups:
            verdicts = self._store.groups.verdicts(group.members)
            members += (read := self._transcripts.take(group.members))
            said += (given := [verdicts[name] for name in group.members])
            runs = [member.trajectory for member in read]
            turns += self._credit.turns(runs, given)
            for role in roles:
                found = self._credit.advantages(runs, given, role)
                advantages[role] += found or (0.0,) * len(read)
        families = [member.trajectory.family for member in members]
        scaled = [self._credit.scale_over_round(families, advantages[role]) for role in roles]
        earned = [dict(zip(roles, of_one, strict=True)) for of_one in zip(*scaled, strict=True)]
        return list(zip(members, said, earned, turns, strict=True))

    def _reward(self, groups: Sequence[Group]) -> dict[str, float]:
        names = [name for group in groups for name in group.members]
        scores = [verdict.score or 0.0 for verdict in self._store.groups.verdicts(names).values()]
        return {"reward": sum(scores) / len(scores) if scores else 0.0, "trajectories": len(names)}


def _groups_with_rows(groups: Sequence[Group], rows: Sequence[TokenRow]) -> list[Group]:
    """Return the groups of which a row is trained."""
    trained = {row.trajectory_id for row in rows}
    return [group for group in groups if not trained.isdisjoint(group.members)]


def _alike(run: Trajectory, keys: Mapping[str, str]) -> str:
    """Return what the rows of attempts at the same thing share: their group, in a cohort nothing."""
    group = run.group_id or ""
    return group if keys.get(group, run.group_key) == run.group_key else f"{group}:{run.id}"
