"""The trainer's controller: the loop that turns sealed trajectories into better versions of one alias.

    component    consumes              produces                         waits for
    ---------    --------------------  -------------------------------  --------------------------------------------
    seal         open trajectories     sealed trajectories              idle time, or the end of a rollout
    collect      sealed trajectories   ready groups, drops, resamples   peers or group_wait_seconds; feedback; vLLM
    judge        ready groups          judged groups, drops, alarms     the judge; the newest groups first
    re-judge     late feedback         further verdicts                 the judge
    warm start   demonstrations        a committed round, candidate     a tuning run that requests it
    sentinel     recent calls, rounds  alarms, blocking findings        sentinel.interval_seconds
    train        judged groups         a committed round, candidate     groups_per_round, or min_groups_per_round after
                                                                        round_wait_seconds; no finding pauses training
    publish      the newest candidate  live, canary, pending approval,  vLLM
                                       unproven, rejected
    evaluate     a proven candidate    scores; in its own thread        vLLM or a workflow, the judges
    canary       the canary's scores   live, rolled back, or pending    scores
    prune        old checkpoints       free disk space                  a release, the proxies
    drain        old versions          free adapter slots               the proxies

Each component changes states in the store: after a crash the next start resumes there. On an error that waiting cannot
fix, the controller stops with a non-zero exit code, and a restart continues from the last commit.

The release phase decides what a step may do. It follows from the newest version that is not decided yet:

    phase        meaning                                              trains, warm-starts    publishes
    ----------   --------------------------------------------------   -------------------    -------------------------
    IDLE         every version is decided                             yes                    the next candidate
    CANDIDATE    a candidate is evaluated, or waits for its base      no                     the candidate, when its
                 model in vLLM                                                               evaluation has ended
    CANARY       a canary serves a share, its scores do not decide    no                     no

The learner's weights belong to `ControllerState.version` unless they are dirty: they then hold steps without a commit,
or other settings, and are reloaded from the newest commit before the next round or release.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path
from typing import Any

from ratchet.store.coordination.proxies import PROXY_TIMEOUT_SECONDS
from ratchet.store.errors import InvalidTransition, RecordNotFound, StoreUnavailable
from ratchet.store.records import Group
from ratchet.store.reports.relative_judges import record_judge_scale
from ratchet.store.states import PolicyState
from ratchet.store.store import Store
from ratchet.trainer.adapters import checkpoint
from ratchet.trainer.adapters.served_base_model import ServedBaseModel
from ratchet.trainer.adapters.vllm_api import VllmServer
from ratchet.trainer.components import make_judging_components, make_release_components
from ratchet.trainer.controller.collect.collector import TrajectoryCollector
from ratchet.trainer.controller.collect.feedback_wait import feedback_wait_of
from ratchet.trainer.controller.collect.role_resolution import RoleResolver
from ratchet.trainer.controller.judging.judged_groups import TranscriptCache
from ratchet.trainer.controller.rounds.backlog import Backlog, RoundSize
from ratchet.trainer.controller.rounds.memory_limit import MemoryLimit
from ratchet.trainer.controller.rounds.round_runner import RoundRunner
from ratchet.trainer.controller.warm_start.sft_round import SFTRound, learner_settings
from ratchet.trainer.controller.warm_start.warm_start_requests import REFUSALS, WarmStartRequests
from ratchet.trainer.errors import EngineUnreachable, OutOfMemory, TrainingDiverged
from ratchet.trainer.learner.learner import Learner
from ratchet.trainer.learner_protocol import LearnerProtocol
from ratchet.trainer.lease import Lease
from ratchet.trainer.observability.metrics import TrainerMetrics
from ratchet.trainer.observability.progress import GATHERING, Progress, StoredProgress, watch_for_service
from ratchet.trainer.release.candidates import next_candidate
from ratchet.trainer.release.evaluation_runner import MakeWorkflowEvaluator
from ratchet.trainer.release.publisher import PublishResult
from ratchet.trainer.release.retention import best_first, retained, versions_in_use
from ratchet.trainer.rows.roles import Roles
from ratchet.trainer.settings.judge_specs import gives_only_ranks
from ratchet.trainer.settings.trainer_settings import TrainerSettings

log = logging.getLogger(__name__)
start = logging.getLogger("ratchet.start")  # logged at any log_level: `ratchet up` waits for it

LearnerFactory = Callable[[TrainerSettings, Path | None], LearnerProtocol]

OUTAGE_PAUSE_SECONDS = 2.0
_DRAIN_INTERVAL_SECONDS = 2.0
_JUDGE_WAIT_SECONDS = 0.5  # per step; slower verdicts are collected in a later step
_MAX_OVERTAKEN = 10  # steps in a row; more than that is not a coincidence


class ReleasePhase(Enum):
    """What the newest undecided version is waiting for; the table at the top of this file."""

    IDLE = auto()
    CANDIDATE = auto()
    CANARY = auto()


@dataclass(frozen=True, slots=True)
class ControllerState:
    """What the controller remembers from one step to the next. Times are Unix seconds."""

    version: int  # the version that the learner's weights belong to
    dirty: bool  # the learner holds steps without a commit, or other settings
    candidate_waiting: bool  # a candidate is being evaluated, or could not be published yet
    judged_since: float | None = None  # when the first group for the next round was judged
    drained_at: float = 0.0
    prune_pending: bool = True


def make_learner(settings: TrainerSettings, resume_from: Path | None) -> LearnerProtocol:
    """Return a new learner, or the learner of a checkpoint."""
    return Learner(settings.base_model, settings.learner, workdir=settings.checkpoints.parent, resume_from=resume_from)


class Controller:
    """The trainer of one alias. `step` does everything that is due once; `run` repeats it until `stop` is set."""

    def __init__(
        self,
        settings: TrainerSettings,
        store: Store,
        stop: threading.Event,
        upstream_key: str | None = None,
        learner_factory: LearnerFactory = make_learner,
        make_workflow_evaluator: MakeWorkflowEvaluator | None = None,
    ) -> None:
        self.settings = settings
        self._store = store
        self._stop = stop
        alias = settings.model
        self._replicas = [VllmServer(url, key=upstream_key) for url in settings.vllm]
        self._base = ServedBaseModel(store, alias, self._replicas)
        self.metrics = TrainerMetrics(alias, store)
        if settings.metrics_port is not None:
            self.metrics.serve(settings.metrics_host, settings.metrics_port)
        self.progress = Progress(watch_for_service(), self.metrics.progress, StoredProgress(store, alias))
        self._gathering = self.progress.begin(GATHERING, settings.groups_per_round)
        self._judging = make_judging_components(settings, store, self.progress)
        self._ranks_only = gives_only_ranks(settings.judge)
        record_judge_scale(store, alias, self._judging.judge.version, relative=self._ranks_only)
        max_transcripts = 4 * settings.groups_per_round * settings.num_generations
        self._transcripts = TranscriptCache(store, max_transcripts)
        role_resolver = RoleResolver(store, alias, Roles(settings.roles, settings.role_patterns))
        self._memory = MemoryLimit(store, alias, settings.learner)
        self._round_runner = RoundRunner(
            store, alias, settings.checkpoints, self._judging.judged, self._transcripts, role_resolver,
            RoundSize(settings.groups_per_round, settings.num_generations), self._memory,
            mask_truncated=settings.mask_truncated_completions,
        )  # fmt: skip
        history = self._judging.judged.estimator.history
        self._collector = TrajectoryCollector(store, settings, role_resolver, history, upstream_key)
        self._release = make_release_components(
            settings, store, self._replicas, self._judging, self.metrics, make_workflow_evaluator
        )
        self._warm_starts = WarmStartRequests(store, settings)
        self._backlog = Backlog(store, settings)
        checkpoint.remove_incomplete(settings.checkpoints)
        version, resume_from = self._round_runner.newest_commit()
        self.learner = self._make_learner(learner_factory, resume_from)
        candidates = any(policy.state is PolicyState.CANDIDATE for policy in store.policies.all(alias))
        self._state = ControllerState(version, dirty=self._memory.is_reduced, candidate_waiting=candidates)
        start.info("event=trainer_ready alias=%s version=%d judge=%s", alias, version, self._judging.judge.name)

    @property
    def phase(self) -> ReleasePhase:
        """The release phase; a new version is only built on decided ones."""
        if self._release.canary.undecided:
            return ReleasePhase.CANARY
        return ReleasePhase.CANDIDATE if self._state.candidate_waiting else ReleasePhase.IDLE

    def close(self) -> None:
        """Close the connections to vLLM and to the judge."""
        self._collector.close()
        self._judging.runner.close()
        self._release.canary.close()
        if self._release.evaluations is not None:
            self._release.evaluations.close()
        for replica in self._replicas:
            replica.close()

    def run(self, lease: Lease) -> None:
        """Repeat `step` until `stop` is set. Raises errors that waiting cannot fix."""
        overtaken = 0  # steps in a row
        while not self._stop.is_set():
            try:
                lease.check()
                worked = self.step(time.time())
                overtaken = 0
            except (StoreUnavailable, EngineUnreachable) as outage:
                log.warning("event=outage reason=%r", str(outage))
                self._stop.wait(OUTAGE_PAUSE_SECONDS)
                continue
            except (InvalidTransition, RecordNotFound) as changed:  # by a person, a deletion, or another leader
                overtaken += 1
                log.warning("event=step_overtaken reason=%r", str(changed))
                if overtaken == _MAX_OVERTAKEN:
                    raise
                worked = False
            if not worked:
                self._stop.wait(self.settings.poll_interval_seconds)

    def step(self, now: float) -> bool:
        """Do everything that is due once; return whether anything was."""
        # Idle time is measured by what the proxies have shipped, not by the clock: records may be on their way.
        alias = self.settings.model
        shipped = self._store.proxy_instances.shipped_until(alias, now, since=now - PROXY_TIMEOUT_SECONDS)
        self._store.trajectories.seal_rollouts(alias, shipped)
        self._store.trajectories.seal_idle_trajectories(alias, shipped, self.settings.seal_after_idle_seconds)
        self._release.sentinel.check(now)
        if self._base.blocking_reason(now) is not None:  # vLLM serves another base model
            return False
        decided = self._release.canary.check(now)
        grouped = self._collector.step(now, shipped)
        judged = self._judge(now)
        trained = self._warm_start(now) or self._train(now)
        if published := self._publish():
            self._prune()
        self._drain(now)
        return decided or grouped or judged or trained or published

    def _judge(self, now: float) -> bool:
        self._judging.runner.submit(self._backlog.groups_to_judge(now), self._transcripts.read)
        recorded = self._judging.runner.collect_results(now, _JUDGE_WAIT_SECONDS)
        if feedback_wait_of(self.settings.judge) is not None:
            self._judging.rejudger.submit_late_feedback(now)
            recorded += self._judging.rejudger.collect_results(now, _JUDGE_WAIT_SECONDS)
        return bool(recorded)

    def _train(self, now: float) -> bool:
        if self.phase is not ReleasePhase.IDLE:
            return False
        groups = self._next_round(now)
        if not groups or self._release.sentinel.pauses_training:
            return False
        self._reload_learner()
        self._update(dirty=True)  # until the commit
        self._gathering.end()
        self._gathering = self.progress.begin(GATHERING, self.settings.groups_per_round)
        try:
            candidate = self._round_runner.run_round(self.learner, groups, self._state.version)
        except TrainingDiverged as diverged:
            log.error("event=round_diverged reason=%r", str(diverged))
            return True
        except OutOfMemory as error:
            log.error("event=round_out_of_memory reason=%r", str(error))
            if not self._memory.record_failure():
                raise
            return True  # the next step tries with less memory
        self._update(dirty=False, judged_since=None)
        if candidate is not None:
            self._update(version=candidate.version)
        return True

    def _next_round(self, now: float) -> list[Group]:
        """Return the groups of the next round; none before it is due."""
        judged = self._backlog.judged()
        if not judged:
            self._update(judged_since=None)
            return []
        since = self._state.judged_since or now
        self._update(judged_since=since)
        weight, wanted = self._backlog.weight(judged), self.settings.groups_per_round
        self._gathering.at(min(weight, wanted), wanted)
        return self._backlog.newest(judged) if self._backlog.is_round_due(weight, now - since) else []

    def _warm_start(self, now: float) -> bool:
        """Run the warm start that a tuning run requests; return whether there was one."""
        if self.phase is not ReleasePhase.IDLE or (request := self._warm_starts.next(now)) is None:
            return False
        try:
            settings, data = self._warm_starts.gather(request)
            self._update(dirty=True)
            version, resume_from = self._round_runner.newest_commit()
            self.learner.load(resume_from, learner_settings(settings, self._memory.learner_settings, len(data.rows)))
            sft_round = SFTRound(self._store, self._round_runner, self.settings.model)
            sft_round.run(self.learner, data, settings, version, request.id)
        except REFUSALS as refusal:
            self._warm_starts.refuse(request, str(refusal))
        return True

    def _reload_learner(self) -> None:
        """Load the newest commit if the learner is dirty or holds another version."""
        version, resume_from = self._round_runner.newest_commit()
        if self._state.dirty or version != self._state.version:  # a version may have been rejected since
            self.learner.load(resume_from, self._memory.learner_settings)
            self._update(version=version, dirty=False)

    def _publish(self) -> bool:
        """Publish the next candidate, unless a version is being evaluated or serves as canary."""
        evaluations = self._release.evaluations
        if self.phase is ReleasePhase.CANARY or (evaluations is not None and evaluations.is_running):
            return False
        try:
            candidate = next_candidate(self._store, self.settings.model)
            self._update(candidate_waiting=False)
            if candidate is None:
                return False
            if self._base.blocking_reason(time.time(), fresh=True) is not None:
                self._update(candidate_waiting=True)
                return False
            self._reload_learner()  # after a warm start, or a round without a commit
            probes = self._round_runner.probes(candidate)
            result = self._release.publisher.publish(candidate, probes, self.learner)
            self._update(candidate_waiting=result is PublishResult.EVALUATING)
        except InvalidTransition as overtaken:  # by a person's decision
            log.info("event=publish_overtaken reason=%r", str(overtaken))
        self._update(prune_pending=True)
        self.metrics.evaluating(self._state.candidate_waiting)
        return not self._state.candidate_waiting

    def _prune(self) -> None:
        """Remove the checkpoints that no version in use, no resumption and no rollback needs."""
        settings, alias = self.settings, self.settings.model
        in_use = versions_in_use(self._store, alias, time.time())
        kept = retained(
            self._store.policies.all(alias),
            pinned=in_use,
            best=self._best_versions(),
            newest=settings.keep_checkpoints,
            states=settings.keep_optimizer_states,
        )
        for old in self._store.policies.all(alias):  # marked first: nobody can promote a half-removed version
            if old.version not in kept.folders and old.adapter and old.pruned_at is None:
                self._store.policies.prune(alias, old.version, time.time())
        removed = checkpoint.prune(settings.checkpoints, kept.folders, kept.states)
        self._update(prune_pending=bool(in_use))
        if removed:
            log.info("event=versions_pruned alias=%s versions=%s", alias, ",".join(map(str, removed)))

    def _best_versions(self) -> list[int]:
        """Return the versions worth a rollback, the best first; none if scores do not compare versions."""
        if self._ranks_only:
            return []
        return best_first(self._store.groups.past_scores(self.settings.model, self._judging.judge.version))

    def _drain(self, now: float) -> None:
        if now - self._state.drained_at >= _DRAIN_INTERVAL_SECONDS:
            self._update(drained_at=now)
            self._release.publisher.drain(now)
            if self._state.prune_pending:  # versions that were pinned, or left by an outage or a kill
                self._prune()

    def _make_learner(self, learner_factory: LearnerFactory, resume_from: Path | None) -> LearnerProtocol:
        learner = learner_factory(self.settings, resume_from)
        if isinstance(learner, Learner):
            learner.report_progress_to(self.progress)
        return learner

    def _update(self, **changes: Any) -> None:
        self._state = replace(self._state, **changes)
