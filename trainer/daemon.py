"""The trainer daemon: the loop that turns sealed trajectories into better versions.

    component    consumes              produces                       waits for
    ---------    --------------------  -----------------------------  ------------------------------
    seal         open trajectories     sealed trajectories            idle time, or the end of a rollout
    assemble     sealed trajectories   ready groups, drops, resamples   company or group_wait_seconds; feedback; vLLM
    score        ready groups          judged groups, drops, alarms   the judge; the newest first, none too old
    rehear       late feedback         further verdicts               the judge
    warm start   good trajectories     a committed round, candidate   a tuning that asks for it
    watch        the newest of all     alarms, doubts                 sentinel.interval_seconds
    train        judged groups         a committed round, candidate   groups_per_round, or min_groups_per_round for
                                                                      round_wait_seconds; that nothing holds training
    publish      the newest candidate  live, canary, held, unproven,  vLLM
                                       rejected
    evaluate     a proven candidate    figures; in its own thread     vLLM or a workflow, the judges
    gate         the canary's scores   live, rolled back, or held     scores; nothing is trained meanwhile
    prune        old versions' folders space on the disk              a publication, proxy instances
    drain        old versions          free adapter slots             proxy instances

Each step is a state change in the store: a crash at any point resumes there. If a step fails for a reason that
waiting cannot mend, the daemon stops loudly with a non-zero exit, and a restart goes on from the last commit.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ratchet.store.coordination.proxies import PROXY_TIMEOUT_SECONDS
from ratchet.store.errors import InvalidTransition, RecordNotFound, StoreUnavailable
from ratchet.store.reports.relative_judges import record_judge_scale
from ratchet.store.states import PolicyState
from ratchet.store.store import Store
from ratchet.trainer.adapters import checkpoint
from ratchet.trainer.adapters.served_base_model import ServedBaseModel
from ratchet.trainer.adapters.vllm_api import Replica
from ratchet.trainer.components import make_judging_components, make_release_components
from ratchet.trainer.controller.collect.collector import TrajectoryCollector
from ratchet.trainer.controller.collect.feedback_wait import feedback_wait_of
from ratchet.trainer.controller.collect.role_resolution import RoleResolver
from ratchet.trainer.controller.judging.transcript_cache import Transcripts
from ratchet.trainer.controller.rounds.backlog import Backlog
from ratchet.trainer.controller.rounds.memory_limit import Memory
from ratchet.trainer.controller.rounds.round_runner import RoundRunner
from ratchet.trainer.controller.rounds.round_size import RoundSize
from ratchet.trainer.controller.warm_start.sft_round import SFTRound, learner_settings
from ratchet.trainer.controller.warm_start.warm_start_requests import REFUSALS, WarmStarts
from ratchet.trainer.errors import EngineUnreachable, OutOfMemory, TrainingDiverged
from ratchet.trainer.learner.learner import Learner
from ratchet.trainer.learner_protocol import LearnerProtocol
from ratchet.trainer.lease import Lease
from ratchet.trainer.observability.metrics import Metrics
from ratchet.trainer.observability.progress import GATHERING, Progress, StoredProgress, watch_for_service
from ratchet.trainer.release.candidates import next_candidate
from ratchet.trainer.release.evaluation_runner import MakeWorkflowEvaluator
from ratchet.trainer.release.publisher import PublishResult
from ratchet.trainer.release.retention import best_first, retained, versions_in_use
from ratchet.trainer.rows.roles import Roles
from ratchet.trainer.settings.judge_specs import gives_only_ranks
from ratchet.trainer.settings.trainer_settings import TrainerSettings

log = logging.getLogger(__name__)
start = logging.getLogger("ratchet.start")  # told at any log_level: `ratchet up` waits for it

LearnerFactory = Callable[[TrainerSettings, Path | None], LearnerProtocol]

_DRAIN_EVERY = 2.0  # seconds
PAUSE_AFTER_OUTAGE = 2.0  # seconds
_MAX_OVERTAKEN = 10  # turns in a row; more than that is no coincidence
_JUDGE_WAIT_SECONDS = 0.5  # seconds that a turn waits for a judge; a slower one is heard in a later turn


def make_learner(settings: TrainerSettings, resume_from: Path | None) -> LearnerProtocol:
    """Return the learner of these settings, as a checkpoint left it, or new."""
    return Learner(settings.base_model, settings.learner, workdir=settings.checkpoints.parent, resume_from=resume_from)


class Daemon:
    """The trainer of one alias. `turn` does whatever is due once; `run` repeats it until `stop` is set."""

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
        self._learner_factory = learner_factory
        self._store = store
        self._stop = stop
        self._replicas = [Replica(url, key=upstream_key) for url in settings.vllm]
        self._base = ServedBaseModel(store, settings.model, self._replicas)
        self.metrics = Metrics(settings.model, store)
        if settings.metrics_port is not None:
            self.metrics.serve(settings.metrics_host, settings.metrics_port)
        standings = StoredProgress(store, settings.model)
        self.progress = Progress(watch_for_service(), self.metrics.progress, standings)
        self._gathering = self.progress.begin(GATHERING, settings.groups_per_round)
        judging = make_judging_components(settings, store, self.progress)
        self._judge_runner, self._rejudger = judging.scorekeeper, judging.rehearing
        self._patience = feedback_wait_of(settings.judge)
        self._judge_version, self._relative = judging.judge.version, gives_only_ranks(settings.judge)
        record_judge_scale(store, settings.model, self._judge_version, relative=self._relative)
        self._transcripts = Transcripts(store, most=4 * settings.groups_per_round * settings.num_generations)
        self._role_resolver = RoleResolver(store, settings.model, Roles(settings.roles, settings.role_patterns))
        self._memory = Memory(store, settings.model, settings.learner)
        self._round_runner = RoundRunner(
            store, settings.model, settings.checkpoints, judging.credit, self._transcripts, casting=self._role_resolver,
            size=RoundSize(settings.groups_per_round, settings.num_generations), memory=self._memory,
            mask_truncated=settings.mask_truncated_completions,
        )  # fmt: skip
        self._collector = TrajectoryCollector(store, settings, self._role_resolver, judging.credit.book, upstream_key)
        releasing = make_release_components(
            settings, store, self._replicas, judging, self.metrics, make_workflow_evaluator
        )
        self._sentinel, self._evaluations = releasing.sentinel, releasing.evaluations
        self._publisher, self._canary = releasing.publisher, releasing.canary
        self._warm_starts = WarmStarts(store, settings)
        checkpoint.sweep(settings.checkpoints)
        self._version, resume_from = self._round_runner.newest()
        self.learner = self._made(resume_from)
        self._backlog = Backlog(store, settings)
        candidates = (p.state is PolicyState.CANDIDATE for p in store.policies.all(settings.model))
        self._candidate_waits = any(candidates)  # an earlier trainer did not come to publish it
        self._spoilt = self._memory.short  # the learner holds steps that no commit stands for, or other settings
        self._first_judged_at: float | None = None
        self._drained_at = 0.0
        self._prune_pending = True
        start.info(
            "event=trainer_ready alias=%s version=%d judge=%s", settings.model, self._version, judging.judge.name
        )

    @property
    def _undecided(self) -> bool:
        """Whether there is a version that the next one cannot be built on or beside yet."""
        return self._canary.undecided or self._candidate_waits

    def _made(self, resume_from: Path | None) -> LearnerProtocol:
        pupil = self._learner_factory(self.settings, resume_from)
        if isinstance(pupil, Learner):
            pupil.report_progress_to(self.progress)
        return pupil

    def close(self) -> None:
        """Close the connections to vLLM and to the judge."""
        self._collector.close()
        self._judge_runner.close()
        self._canary.close()
        if self._evaluations is not None:
            self._evaluations.close()
        for replica in self._replicas:
            replica.close()

    def run(self, lease: Lease) -> None:
        """Work until `stop` is set. Raises what waiting cannot mend."""
        overtaken = 0  # turns in a row
        while not self._stop.is_set():
            try:
                lease.check()
                worked = self.turn(time.time())
                overtaken = 0
            except (StoreUnavailable, EngineUnreachable) as outage:
                log.warning("event=outage reason=%r", str(outage))
                self._stop.wait(PAUSE_AFTER_OUTAGE)
                continue
            except (InvalidTransition, RecordNotFound) as changed:  # a person, a deletion, or a leader that stood still
                overtaken += 1
                log.warning("event=turn_overtaken reason=%r", str(changed))
                if overtaken == _MAX_OVERTAKEN:
                    raise
                worked = False
            if not worked:
                self._stop.wait(self.settings.poll_interval_seconds)

    def turn(self, now: float) -> bool:
        """Do everything that is due once; return whether there was anything."""
        # Stillness is counted in what the proxies have shipped, not in what the clock says: a record may be on its way.
        alias = self.settings.model
        shipped = self._store.proxy_instances.shipped_until(alias, now, since=now - PROXY_TIMEOUT_SECONDS)
        self._store.trajectories.seal_rollouts(alias, shipped)
        self._store.trajectories.seal_idle_trajectories(alias, shipped, self.settings.seal_after_idle_seconds)
        self._sentinel.look(now)
        if self._base.objection(now) is not None:  # what vLLM answers now is another model's
            return False
        decided = self._canary.check(now)
        grouped = self._collector.turn(now, shipped)
        scored = self._score(now)
        trained = self._warm_start(now) or self._train(now)
        if published := self._publish():
            self._prune()
        self._drain(now)
        return decided or grouped or scored or trained or published

    def _score(self, now: float) -> bool:
        self._judge_runner.ask(self._backlog.to_judge(now), self._transcripts.read)
        scored = self._judge_runner.collect(now, _JUDGE_WAIT_SECONDS)
        if self._patience is not None:
            self._rejudger.look(now)
            scored += self._rejudger.collect(now, _JUDGE_WAIT_SECONDS)
        return bool(scored)

    def _train(self, now: float) -> bool:
        if self._undecided:  # the next version is built on a decided one
            return False
        waiting = self._backlog.judged()
        if not waiting:
            self._first_judged_at = None
            return False
        self._first_judged_at = self._first_judged_at or now
        weight, wanted = self._backlog.weight(waiting), self.settings.groups_per_round
        self._gathering.at(min(weight, wanted), wanted)
        if not self._backlog.is_round_due(weight, now - self._first_judged_at):
            return False
        if self._sentinel.holding:
            return False
        newest = self._backlog.newest(waiting)
        self._renew()
        # Whatever ends the round before its commit leaves a learner that nothing stands for.
        self._spoilt = True
        self._gathering.end()
        self._gathering = self.progress.begin(GATHERING, wanted)
        try:
            candidate = self._round_runner.run_round(self.learner, newest, self._version)
            self._spoilt = False
        except TrainingDiverged as diverged:
            log.error("event=round_diverged reason=%r", str(diverged))
            return True
        except OutOfMemory as short:
            log.error("event=round_out_of_memory reason=%r", str(short))
            if not self._memory.failed():
                raise
            return True  # the next turn tries it in less memory
        self._first_judged_at = None
        if candidate is not None:
            self._version = candidate.version
        return True

    def _warm_start(self, now: float) -> bool:
        """Imitate, where a tuning asks for it; return whether it was answered."""
        if self._undecided or (asked := self._warm_starts.next(now)) is None:
            return False
        try:
            wanted, material = self._warm_starts.gather(asked)
            self._spoilt = True
            version, resume_from = self._round_runner.newest()
            self.learner.load(resume_from, learner_settings(wanted, self._memory.learner, len(material.rows)))
            imitation = SFTRound(self._store, self._round_runner, self.settings.model)
            imitation.hold(self.learner, material, wanted, version, asked.id)
        except REFUSALS as refusal:
            self._warm_starts.refuse(asked, str(refusal))
        return True

    def _renew(self) -> None:
        """Put the learner where the newest commit is, if it holds steps of no commit, or misses those of one."""
        version, resume_from = self._round_runner.newest()
        if self._spoilt or version != self._version:  # a version may have been rejected since
            self.learner.load(resume_from, self._memory.learner)
            self._version, self._spoilt = version, False

    def _publish(self) -> bool:
        """Publish the candidate whose turn it is; one that is being tried is published when that is over."""
        if self._canary.undecided or (self._evaluations is not None and self._evaluations.is_running):
            return False
        try:
            candidate = next_candidate(self._store, self.settings.model)
            self._candidate_waits = False
            if candidate is None:
                return False
            if self._base.objection(time.time(), fresh=True) is not None:
                self._candidate_waits = True
                return False
            self._renew()  # after a warm start, or a round that came to nothing
            result = self._publisher.publish(candidate, self._round_runner.probes(candidate), self.learner)
            self._candidate_waits = result is PublishResult.EVALUATING
        except InvalidTransition as overtaken:  # a person decided meanwhile
            log.info("event=publish_overtaken reason=%r", str(overtaken))
        self._prune_pending = True
        self.metrics.evaluating(self._candidate_waits)
        return not self._candidate_waits

    def _best(self) -> list[int]:
        """Return the versions worth a look back, the best first; none where scores do not compare versions."""
        if self._relative:
            return []
        return best_first(self._store.groups.past_scores(self.settings.model, self._judge_version))

    def _prune(self) -> None:
        """Remove from the disk what no version in use, no resumption and no look back needs."""
        settings, alias = self.settings, self.settings.model
        in_use = versions_in_use(self._store, alias, time.time())
        kept = retained(
            self._store.policies.all(alias),
            pinned=in_use,
            best=self._best(),
            newest=settings.keep_checkpoints,
            states=settings.keep_optimizer_states,
        )
        for old in self._store.policies.all(alias):  # first the mark, so that nobody promotes what is half gone
            if old.version not in kept.folders and old.adapter and old.pruned_at is None:
                self._store.policies.prune(alias, old.version, time.time())
        gone = checkpoint.prune(settings.checkpoints, kept.folders, kept.states)
        self._prune_pending = bool(in_use)
        if gone:
            log.info("event=versions_pruned alias=%s versions=%s", alias, ",".join(map(str, gone)))

    def _drain(self, now: float) -> None:
        if now - self._drained_at >= _DRAIN_EVERY:
            self._drained_at = now
            self._publisher.drain(now)
            if self._prune_pending:  # also what was pinned, or what an outage or a kill left
                self._prune()
