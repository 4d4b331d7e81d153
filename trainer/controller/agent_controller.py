"""AgentController: turns the sealed trajectories of one agent into better versions of it, step by step.

    component    consumes              produces                         waits for
    ---------    --------------------  -------------------------------  --------------------------------------------
    seal         open trajectories     sealed trajectories              idle time, or the end of a rollout
    collect      sealed trajectories   ready groups, drops, resamples   peers or group_wait_seconds; feedback; vLLM
    judge        ready groups          judged groups, drops, alarms     the judge (T); the newest groups first
    re-judge     late feedback         further verdicts                 the judge (T)
    sentinel     recent calls, rounds  alarms, blocking findings        sentinel.interval_seconds
    warm start   demonstrations        a committed round, candidate     a tuning run that requests it; the learner (L)
    train        judged groups         a committed round, candidate     a full round, or round_wait_seconds; no finding
                                                                        that pauses training; the learner (L)
    publish      the newest candidate  ramp, live, pending approval,    vLLM and the learner (L)
                                       unproven, rejected
    prune        old checkpoints       free disk space                  a release, the proxies (L)
    evaluate     a proven candidate    scores                           vLLM or a workflow, the judges (T)
    release      settled outcomes      live, anchor, rollback, shares   scores; a person, if the gain is too large
    drain        old versions          free adapter slots               the proxies, vLLM (R)
    base model   vLLM's fingerprint    an alarm that stops training     vLLM (R)

A step does what is due and waits for nothing. What may take long runs in threads, and a later step records the result:
(T) in threads of its own, (L) in the one thread that uses the learner, (R) in the one that talks to the replicas.

Each component changes states in the store: after a crash the next start resumes there. An outage (store, vLLM, learner)
delays what needs it. An error that waiting cannot fix is raised by `step`; `process.py` starts the agent again.

The release phase decides what a step may do. Training does not wait for a ramp; it stops when the newest version is
`max_staleness` ahead of what serves, and after repeated rollbacks:

    phase        meaning                                              trains, warm-starts    publishes
    ----------   --------------------------------------------------   -------------------    -------------------------
    IDLE         every version is decided                             yes                    the next candidate
    CANDIDATE    a candidate is evaluated, or waits for its base      no                     the candidate, when its
                 model in vLLM                                                               evaluation has ended
    BLOCKED      a version is in its ramp, pinned, or waits for a     yes                    no
                 person
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from enum import Enum, auto
from functools import partial

from ratchet.store.coordination import ALL_KINDS, ActivityKind
from ratchet.store.errors import InvalidTransition, RecordNotFound, StoreUnavailable
from ratchet.store.records import Group, Policy
from ratchet.store.reports.learning_report import record_judge_scale
from ratchet.store.states import PolicyState
from ratchet.store.store import Store
from ratchet.trainer.adapters.adapter_store import make_adapter_store
from ratchet.trainer.adapters.base_model_files import ServedBaseModel
from ratchet.trainer.adapters.vllm_api import ReplicaFleet, VllmServer
from ratchet.trainer.advantages import AdvantageEstimator, ScoreHistory
from ratchet.trainer.background_work import BackgroundWork, ignore, no_change
from ratchet.trainer.collect.collector import RoleResolver, TrajectoryCollector, feedback_wait_of
from ratchet.trainer.controller.learner_work import LearnerFactory, LearnerWork, Publication, best_first
from ratchet.trainer.errors import (
    AdapterStoreUnreachable,
    EngineUnreachable,
    JudgeError,
    LearnerUnreachable,
    OutOfMemory,
)
from ratchet.trainer.judges.judge_runner import (
    JudgeRunner,
    SecondJudge,
    TranscriptCache,
    zero_variance_groups,
)
from ratchet.trainer.judges.judgement import Judge
from ratchet.trainer.judges.kinds.teacher import TeacherJudge
from ratchet.trainer.judges.make_judge import RunJudges, make_judge
from ratchet.trainer.judges.quality import NOISE
from ratchet.trainer.learner_api import LearnerProtocol
from ratchet.trainer.observability.metrics import TrainerMetrics
from ratchet.trainer.observability.progress import GATHERING, Progress, StoredProgress, watch_for_service
from ratchet.trainer.release.evaluation import MakeWorkflowEvaluator, make_checks, make_second_judge
from ratchet.trainer.release.release import Release, next_candidate
from ratchet.trainer.rounds.backlog import Backlog, RoundSize
from ratchet.trainer.rounds.round_runner import MemoryLimit, RoundRunner
from ratchet.trainer.rows.token_row import Roles
from ratchet.trainer.sentinel.sentinel import Sentinel
from ratchet.trainer.settings.judge_specs import TeacherSpec, asks_language_model, gives_only_ranks
from ratchet.trainer.settings.objectives import find_estimator
from ratchet.trainer.settings.trainer_settings import TrainerSettings
from ratchet.trainer.warm_start import WarmStartRequests

log = logging.getLogger(__name__)
start = logging.getLogger("ratchet.start")  # logged at any log_level: `ratchet up` waits for it

ASSUMED_NOISE = 0.02  # of a language model's scores, until it is measured
OVERTAKEN = (InvalidTransition, RecordNotFound)  # changed by a person, a deletion, or another trainer
MAX_OVERTAKEN = 10  # in a row; more is no coincidence
_UPKEEP_SECONDS = 5.0
_QUIET_UPKEEP_SECONDS = 30.0  # if nothing was released lately and nothing is left to prune
_RELEASE_SETTLES_SECONDS = 120.0


# Outages: errors that waiting may fix, and the alarm of one that lasts.
#
# A step or a piece of work that meets one is tried again after a pause. An outage is a line in the log at its begin,
# once a minute and at its end; one that lasts is the alarm `outage`, which names what does not answer and clears when
# the agent's work goes on.

OUTAGES = (StoreUnavailable, EngineUnreachable, LearnerUnreachable, AdapterStoreUnreachable)
OUTAGE_PAUSE_SECONDS = 2.0
ALARM = "outage"
_ALARM_SECONDS = 15.0
_LEARNER_SECONDS = 600.0  # a large base model takes minutes to load
_LOG_SECONDS = 60.0


class Outages:
    """The outages of one agent, with the alarm, or of the store for all agents. Times are Unix seconds."""

    def __init__(self, alias: str = "", store: Store | None = None) -> None:
        self._alias = alias
        self._store = store
        self._began_at: float | None = None
        self._logged_at: dict[str, float] = {}  # by work
        self._may_be_raised = store is not None  # by an earlier trainer

    def record(self, outage: Exception, now: float, work: str = "") -> None:
        """Log an outage, unless that was done within the last minute, and raise the alarm once it has lasted."""
        self._began_at = now if self._began_at is None else self._began_at
        if now - self._logged_at.get(work, -_LOG_SECONDS) >= _LOG_SECONDS:
            self._logged_at[work] = now
            log.warning("event=outage alias=%s work=%r reason=%r", self._alias, work, str(outage))
        limit = _LEARNER_SECONDS if isinstance(outage, LearnerUnreachable) else _ALARM_SECONDS
        if self._store is None or now - self._began_at < limit or isinstance(outage, StoreUnavailable):
            return
        with suppress(StoreUnavailable):
            self._store.alarms.raise_(
                f"{ALARM}:{self._alias}",
                f"training of {self._alias} waits, and is tried again every {OUTAGE_PAUSE_SECONDS:g} s: {outage}",
            )
            self._may_be_raised = True

    def end(self, now: float) -> None:
        """Record that the work goes on."""
        if self._began_at is not None:
            log.info("event=outage_ended alias=%s seconds=%.0f", self._alias, now - self._began_at)
            self._began_at, self._logged_at = None, {}
        if self._may_be_raised and self._store is not None:
            self._store.alarms.clear(f"{ALARM}:{self._alias}")
            self._may_be_raised = False


class ReleasePhase(Enum):
    """What the newest undecided version is waiting for; the table at the top of this file."""

    IDLE = auto()
    CANDIDATE = auto()
    BLOCKED = auto()


class AgentController:
    """The controller of one agent. `on_change` is called, in any thread, when a further step would do something."""

    def __init__(
        self,
        settings: TrainerSettings,
        store: Store,
        learner_factory: LearnerFactory,
        upstream_key: str | None = None,
        make_workflow_evaluator: MakeWorkflowEvaluator | None = None,
        *,
        metrics: TrainerMetrics | None = None,
        stored_progress: StoredProgress | None = None,
        on_change: Callable[[], None] = ignore,
        max_judge_threads: int | None = None,
        make_background: Callable[[str, Callable[[], None]], BackgroundWork] = BackgroundWork,
    ) -> None:
        self.settings = settings
        self._store, self._judge_wait_seconds = store, 0.0
        alias = settings.model
        self._outage = Outages(alias, store)
        self._replicas = ReplicaFleet(settings.vllm, upstream_key)
        self._base = ServedBaseModel(store, alias, self._replicas)
        self.metrics = metrics or TrainerMetrics(alias, store)
        stored = [stored_progress.watch(alias)] if stored_progress else []
        self.progress = Progress(watch_for_service(alias), self.metrics.progress, *stored)
        self._gathering = self.progress.begin(GATHERING, settings.groups_per_round)
        second = self._make_judging(on_change, max_judge_threads)
        self._ranks_only = gives_only_ranks(settings.judge)
        record_judge_scale(store, alias, self._judge.version, relative=self._ranks_only)
        cached = 4 * settings.groups_per_round * settings.num_generations
        self._transcripts = TranscriptCache(store, cached, lambda read: self._sentinel.note(read))
        role_resolver = RoleResolver(store, alias, Roles(settings.roles, settings.role_patterns))
        self._memory = MemoryLimit(store, alias, settings.learner)
        adapters = make_adapter_store(settings)
        round_runner = RoundRunner(
            store, alias, settings.versions, self._estimator, self._transcripts, role_resolver,
            RoundSize(settings.groups_per_round, settings.num_generations), self._memory,
            mask_truncated=settings.mask_truncated_completions, penalized=settings.train_penalized, adapters=adapters,
        )  # fmt: skip
        history = self._estimator.history
        self._collector = TrajectoryCollector(store, settings, role_resolver, history, upstream_key)
        self._sentinel = Sentinel(settings.sentinel, store, alias, self.metrics, second)
        self._release = Release(
            store, self._replicas, settings, self._judge.version,
            checks=make_checks(settings, store, self._replicas, make_workflow_evaluator),
            second=make_second_judge(settings), blocking_findings=self._sentinel.blocking_findings,
            metrics=self.metrics,
        )  # fmt: skip
        self._warm_starts = WarmStartRequests(store, settings)
        self._backlog = Backlog(store, settings)
        adapters.check(settings.versions)
        adapters.remove_incomplete(settings.versions)
        self._work = LearnerWork(
            settings, store, learner_factory, round_runner, self._memory, self._release, self._base,
            self._warm_starts, self._best_versions, self.progress, adapters,
        )  # fmt: skip
        self._learning = make_background(f"learning {alias}", on_change)  # (L)
        self._upkeep = make_background(f"upkeep {alias}", ignore)  # (R); nothing waits for its end
        states = [policy.state for policy in store.policies.all(alias)]
        # What is remembered from one step to the next; times are Unix seconds.
        self._candidate_waiting = PolicyState.CANDIDATE in states  # it is evaluated, or could not be published yet
        self._opened = False  # the learner was asked for
        self._unread = False  # more groups wait than the judge's queue holds
        self._judged_since: float | None = None  # when the first group for the next round was judged
        self._upkeep_at = self._released_at = 0.0  # released: when a version was last published or decided on
        self._prune_pending = True
        self._learner_due_at = 0.0  # after an outage
        self._overtaken = 0  # works in a row
        judge, version = self._judge.name, self._work.version
        start.info("event=trainer_ready alias=%s version=%d judge=%s", alias, version, judge)

    def _make_judging(self, on_judged: Callable[[], None], max_judge_threads: int | None) -> SecondJudge | None:
        """Make what judges the groups; return the second judge. `on_judged` is called in the judges' threads.

        Raises JudgeError if a judge cannot be used.
        """
        settings, store, alias = self.settings, self._store, self.settings.model
        find_estimator(settings.advantage_estimator)  # a plug-in that cannot be imported ends the start, not a round
        self._judge = _make_judge(settings, store, self._replicas)
        second = None
        if (spec := settings.sentinel.second_judge) is not None:
            share = settings.sentinel.second_judge_sample_rate
            second = SecondJudge(make_judge(spec, os.environ), share, store, alias, self._judge.version)
        self._estimator = AdvantageEstimator(
            settings.advantage_estimator,
            settings.scale_advantages_by_family,
            settings.min_baseline_samples,
            settings.roles,
            ScoreHistory(store.groups.past_scores(alias, self._judge.version)),
            settings.turn_weight,
            settings.learner.objective.distillation,
            judge_noise(settings, store, self._judge.version),
        )
        self._judge_runner = JudgeRunner(
            store,
            RunJudges(self._judge, store.tunings.get),
            attempts=settings.judge_attempts,
            retry_seconds=settings.judge_retry_seconds,
            estimator=self._estimator,
            progress=self.progress,
            second=second,
            zero_variance=zero_variance_groups(store, alias),
            min_group_size=settings.min_group_size,
            on_done=on_judged,
            max_threads=max_judge_threads,
            on_requests=self.metrics.judge_requests,
        )
        return second

    @property
    def learner(self) -> LearnerProtocol:
        return self._work.learner

    @property
    def phase(self) -> ReleasePhase:
        if self._release.is_publishing_blocked:
            return ReleasePhase.BLOCKED
        return ReleasePhase.CANDIDATE if self._candidate_waiting else ReleasePhase.IDLE

    @property
    def is_watching(self) -> bool:
        """Whether something runs or is compared whose end nobody reports, so that steps must be frequent."""
        return self._release.is_evaluating or self._collector.is_resampling or self._sentinel.is_behind

    def close(self, timeout: float = 0.0) -> None:
        """Wait at most `timeout` seconds for the work that runs, then leave it and close all connections.

        Work that is left behind cannot commit once another trainer has started a round.
        """
        if not self._learning.wait(timeout):
            log.warning("event=work_abandoned alias=%s work=%r", self.settings.model, self._learning.what)
        self._learning.close()
        self._upkeep.close()
        self._collector.close()
        self._judge_runner.close()
        self._release.close()
        self._work.close()
        self._replicas.close()

    def step(self, now: float, waiting: Set[str] = ALL_KINDS) -> bool:
        """Do everything that is due once, without waiting; return whether anything was.

        `waiting`: the kinds of activity that the store may hold for this agent. Raises OUTAGES and OVERTAKEN, and
        errors that waiting cannot fix.
        """
        worked = self._collect_work(now)
        if not self._opened:
            self._opened = True
            self._learning.start("opening the learner", self._work.open, no_change)
            self._collect_work(now)
        shipped = self._collector.seal(now, waiting)
        self._sentinel.check(now)
        self._check_base_model(now)
        if self._base.known_reason is not None:  # vLLM serves another base model
            return worked
        worked |= self._decide_release(now)
        formed = shipped is not None and self._collector.step(now, shipped)
        self._submit_to_judge(now, any_ready=formed or self._unread or ActivityKind.READY in waiting)
        recorded = self._collect_verdicts(now)
        worked |= formed | recorded
        any_judged = recorded or ActivityKind.JUDGED in waiting or self._judged_since is not None
        worked |= self._warm_start(now) or (any_judged and self._train(now))
        worked |= self._publish(now)
        self._drain(now)
        return worked

    def react(self, now: float) -> None:
        """Do what the end of our own work makes due: record verdicts, rounds and publications, start what follows."""
        worked = self._collect_work(now)
        if self._base.known_reason is None:
            worked |= self._collect_verdicts(now)
            if self._unread:
                self._submit_to_judge(now)
            if worked or self._judged_since is not None:
                self._train(now)
            self._publish(now)

    def _decide_release(self, now: float) -> bool:
        if not self._release.check(now):
            return False
        self._released_at = now
        return True

    def _submit_to_judge(self, now: float, *, any_ready: bool = True) -> None:
        if any_ready:
            groups = self._backlog.groups_to_judge(now, drop_stale=not self._learning.is_busy)
            self._unread = self._judge_runner.submit(groups, self._transcripts.read)
        if feedback_wait_of(self.settings.judge) is not None:
            self._judge_runner.judge_again(self.settings.model, now)

    def _collect_verdicts(self, now: float) -> bool:
        return bool(self._judge_runner.collect_results(now, self._judge_wait_seconds))

    def _train(self, now: float) -> bool:
        if self.phase is ReleasePhase.CANDIDATE or not self._is_learner_free(now):
            return False
        groups = self._next_round(now)
        if not groups or self._sentinel.pauses_training or self._release.pauses_training:
            return False
        self._gathering.end()
        self._gathering = self.progress.begin(GATHERING, self.settings.groups_per_round)
        self._learning.start("a round", partial(self._work.train, groups), self._record_round)
        return self._collect_work(now)

    def _record_round(self, outcome: Policy | OutOfMemory | None) -> bool:
        if isinstance(outcome, OutOfMemory):
            log.error("event=round_out_of_memory alias=%s reason=%r", self.settings.model, str(outcome))
            if not self._memory.record_failure():
                raise outcome
        else:  # the next step tries again with less memory, or with the next groups
            self._judged_since = None
            self._candidate_waiting = outcome is not None
        return True

    def _next_round(self, now: float) -> list[Group]:
        """Return the groups of the next round; none before it is due."""
        judged = self._backlog.judged()
        if not judged:
            self._judged_since = None
            return []
        since = self._judged_since or now
        self._judged_since = since
        weight, wanted = self._backlog.weight(judged), self.settings.groups_per_round
        self._gathering.at(min(weight, wanted), wanted)
        requested = any(group.is_requested for group in judged)
        due = self._backlog.is_round_due(weight, now - since, requested=requested)
        return self._backlog.newest(judged) if due else []

    def _warm_start(self, now: float) -> bool:
        """Start the warm start that a tuning run requests; return whether one is over."""
        if self.phase is ReleasePhase.CANDIDATE or not self._is_learner_free(now):
            return False
        request = self._warm_starts.next(now)
        if request is None:
            return False
        self._learning.start("a warm start", partial(self._work.warm_start, request), self._record_warm_start)
        return self._collect_work(now)

    def _record_warm_start(self, _: None) -> bool:
        self._candidate_waiting = True  # until the next step has looked
        return True

    def _publish(self, now: float) -> bool:
        """Publish the next candidate, unless a version is being evaluated, is in its ramp or waits for a person."""
        if self.phase is ReleasePhase.BLOCKED or self._release.is_evaluating or not self._is_learner_free(now):
            return False
        if not self._candidate_waiting and not self._release.has_candidate:
            return False
        try:
            candidate = next_candidate(self._store, self.settings.model)
        except InvalidTransition as overtaken:  # by a person's decision
            log.info("event=publish_overtaken alias=%s reason=%r", self.settings.model, str(overtaken))
            return False
        self._candidate_waiting = candidate is not None
        if candidate is None:
            return False
        what = f"the publication of {self.settings.model}@{candidate.version}"
        self._learning.start(what, partial(self._work.publish, candidate), partial(self._record_publication, now))
        return self._collect_work(now)

    def _record_publication(self, now: float, outcome: Publication) -> bool:
        self._candidate_waiting = outcome.waiting
        self._prune_pending = outcome.prune_pending
        self._released_at = now
        self.metrics.evaluating(outcome.waiting)
        return not outcome.waiting

    def _best_versions(self) -> list[int]:
        """Return the versions worth a rollback, the best first; none if scores do not compare versions."""
        scores = self._store.groups.past_scores(self.settings.model, self._judge.version)
        return [] if self._ranks_only else best_first(scores)

    def _check_base_model(self, now: float) -> None:
        if self._base.is_due(now) and not self._upkeep.is_busy:
            check = partial(self._base.blocking_reason, now)
            self._upkeep.start("the check of vLLM's base model", check, no_change)
            self._collect_work(now)

    def _drain(self, now: float) -> None:
        """Unload what nobody needs, and prune versions that were pinned, or left by an outage or a kill."""
        lately = self._prune_pending or now - self._released_at < _RELEASE_SETTLES_SECONDS
        every = _UPKEEP_SECONDS if lately else _QUIET_UPKEEP_SECONDS
        if self._upkeep.is_busy or now - self._upkeep_at < every:
            return
        self._upkeep_at = now
        if self._is_learner_free(now):
            catch_up = partial(self._work.catch_up, now, prune=self._prune_pending)
            self._learning.start("proofs on replicas that came later", catch_up, self._record_pruning)
            self._collect_work(now)
        self._upkeep.start("unloading old versions", partial(self._drain_replicas, now), no_change)
        self._collect_work(now)

    def _drain_replicas(self, now: float) -> None:
        self._replicas.refresh(now)
        self._release.drain(now)

    def _record_pruning(self, pending: bool) -> bool:
        self._prune_pending = pending
        return False

    def _is_learner_free(self, now: float) -> bool:
        return not self._learning.is_busy and now >= self._learner_due_at

    def _collect_work(self, now: float) -> bool:
        """Record what the background work has finished; return whether anything was. An outage is tried again later."""
        worked = False
        for work in (self._learning, self._upkeep):
            what = work.what
            try:
                worked |= work.collect()
                if work is self._learning and what is not None and not work.is_busy:
                    self._overtaken = 0
                    self._outage.end(now)
            except OUTAGES as outage:
                self._outage.record(outage, now, what or "")
                if work is self._learning:
                    self._learner_due_at, self._prune_pending = now + OUTAGE_PAUSE_SECONDS, True
            except OVERTAKEN as changed:
                log.warning("event=work_overtaken alias=%s work=%r reason=%r", self.settings.model, what, str(changed))
                self._overtaken += 1
                if self._overtaken == MAX_OVERTAKEN:
                    raise
        return worked


def judge_noise(settings: TrainerSettings, store: Store, version: str) -> float:
    """Return the noise of this version of the judge: as set, as measured, or as assumed."""
    if settings.judge_noise is not None:
        return settings.judge_noise
    measured = store.observations.latest(settings.model, NOISE).get(version)
    if measured is not None:
        return float(measured.content["noise"])
    return ASSUMED_NOISE if asks_language_model(settings.judge) else 0.0


def _make_judge(settings: TrainerSettings, store: Store, replicas: Sequence[VllmServer]) -> Judge:
    """Return the judge; a teacher that cannot teach this policy is refused, one that does not answer yet is not."""
    if not isinstance(settings.judge, TeacherSpec):
        return make_judge(settings.judge, os.environ)

    def policy() -> VllmServer:
        for replica in replicas:
            return replica
        raise EngineUnreachable("no vLLM replica is known yet")

    teacher = TeacherJudge(settings.judge, os.environ, store.trajectories.context_calls, policy)
    try:
        teacher.check()
    except EngineUnreachable as away:  # it is checked before it scores
        log.warning("event=teacher_not_checked alias=%s reason=%r", settings.model, str(away))
    except JudgeError:
        teacher.close()
        raise
    return teacher
