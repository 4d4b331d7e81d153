"""The trainer daemon: the loop that turns sealed trajectories into better versions.

    component    consumes              produces                       waits for
    ---------    --------------------  -----------------------------  ------------------------------
    seal         open trajectories     sealed trajectories            idle time, or the end of a rollout
    assemble     sealed trajectories   ready groups, drops, shadows   company or group_wait_seconds; feedback; vLLM
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
    prune        old versions' folders space on the disk              a publication, the doors
    drain        old versions          free adapter slots             the doors

Each step is a state change in the store: a crash at any point resumes there. If a step fails for a reason that
waiting cannot mend, the daemon stops loudly with a non-zero exit, and a restart goes on from the last commit.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ratchet.store.coordination.proxies import DOOR_SILENCE
from ratchet.store.errors import ForbiddenChange, StoreUnavailable, UnknownRecord
from ratchet.store.reports.relative_judges import note_judge
from ratchet.store.states import PolicyState
from ratchet.store.store import Store
from ratchet.trainer.adapters import checkpoint
from ratchet.trainer.adapters.served_base_model import ServedBase
from ratchet.trainer.adapters.vllm_api import Replica
from ratchet.trainer.components import make_judging, make_releasing
from ratchet.trainer.controller.collect.collector import Assembly
from ratchet.trainer.controller.collect.feedback_wait import patience_of
from ratchet.trainer.controller.collect.role_resolution import Casting
from ratchet.trainer.controller.judging.transcript_cache import Transcripts
from ratchet.trainer.controller.rounds.backlog import Backlog
from ratchet.trainer.controller.rounds.memory_limit import Memory
from ratchet.trainer.controller.rounds.round_runner import School
from ratchet.trainer.controller.rounds.round_size import RoundSize
from ratchet.trainer.controller.warm_start.sft_round import Imitation, learner_settings
from ratchet.trainer.controller.warm_start.warm_start_requests import REFUSALS, WarmStarts
from ratchet.trainer.errors import EngineUnreachable, OutOfMemory, TrainingDiverged
from ratchet.trainer.learner.learner import Learner
from ratchet.trainer.learner_protocol import Pupil
from ratchet.trainer.lease import Lease
from ratchet.trainer.observability.metrics import Metrics
from ratchet.trainer.observability.progress import GATHERING, Progress, on_this_terminal
from ratchet.trainer.observability.stored_progress import StoredStandings
from ratchet.trainer.release.candidates import next_candidate
from ratchet.trainer.release.evaluation_runner import MakeWorkflowEvaluator
from ratchet.trainer.release.retention import best_first, retained
from ratchet.trainer.release.versions_in_use import versions_in_use
from ratchet.trainer.rows.roles import Roles
from ratchet.trainer.settings.judge_specs import only_ranks
from ratchet.trainer.settings.trainer_settings import TrainerSettings

log = logging.getLogger(__name__)
start = logging.getLogger("ratchet.start")  # told at any log_level: `ratchet up` waits for it

MakePupil = Callable[[TrainerSettings, Path | None], Pupil]

_DRAIN_EVERY = 2.0  # seconds
PAUSE_AFTER_OUTAGE = 2.0  # seconds
_MOST_OVERTAKEN = 10  # turns in a row; more than that is no coincidence
_JUDGE_PATIENCE = 0.5  # seconds that a turn waits for a judge; a slower one is heard in a later turn


def make_learner(settings: TrainerSettings, resume_from: Path | None) -> Pupil:
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
        make_pupil: MakePupil = make_learner,
        make_workflow_evaluator: MakeWorkflowEvaluator | None = None,
    ) -> None:
        self.settings = settings
        self._make_pupil = make_pupil
        self._store = store
        self._stop = stop
        self._replicas = [Replica(url, key=upstream_key) for url in settings.vllm]
        self._base = ServedBase(store, settings.model, self._replicas)
        self.metrics = Metrics(settings.model, store)
        if settings.metrics_port is not None:
            self.metrics.serve(settings.metrics_host, settings.metrics_port)
        standings = StoredStandings(store, settings.model)
        self.progress = Progress(on_this_terminal(), self.metrics.progress, standings)
        self._gathering = self.progress.begin(GATHERING, settings.groups_per_round)
        judging = make_judging(settings, store, self.progress)
        self._scorekeeper, self._rehearing = judging.scorekeeper, judging.rehearing
        self._patience = patience_of(settings.judge)
        self._judge_version, self._relative = judging.judge.version, only_ranks(settings.judge)
        note_judge(store, settings.model, self._judge_version, relative=self._relative)
        self._transcripts = Transcripts(store, most=4 * settings.groups_per_round * settings.num_generations)
        self._casting = Casting(store, settings.model, Roles(settings.roles, settings.role_patterns))
        self._memory = Memory(store, settings.model, settings.learner)
        self._school = School(
            store, settings.model, settings.checkpoints, judging.credit, self._transcripts, casting=self._casting,
            size=RoundSize(settings.groups_per_round, settings.num_generations), memory=self._memory,
            mask_truncated=settings.mask_truncated_completions,
        )  # fmt: skip
        self._assembly = Assembly(store, settings, self._casting, judging.credit.book, upstream_key)
        releasing = make_releasing(settings, store, self._replicas, judging, self.metrics, make_workflow_evaluator)
        self._sentinel, self._evaluations = releasing.sentinel, releasing.evaluations
        self._publisher, self._gate = releasing.publisher, releasing.gate
        self._warm_starts = WarmStarts(store, settings)
        checkpoint.sweep(settings.checkpoints)
        self._version, resume_from = self._school.newest()
        self.learner = self._made(resume_from)
        self._backlog = Backlog(store, settings)
        candidates = (p.state is PolicyState.CANDIDATE for p in store.policies.all(settings.model))
        self._left_over = any(candidates)  # an earlier trainer did not come to publish it
        self._spoilt = self._memory.short  # the learner holds steps that no commit stands for, or other settings
        self._first_judged: float | None = None
        self._drained_at = 0.0
        self._prune_due = True
        start.info(
            "event=trainer_ready alias=%s version=%d judge=%s", settings.model, self._version, judging.judge.name
        )

    @property
    def _undecided(self) -> bool:
        """Whether there is a version that the next one cannot be built on or beside yet."""
        return self._gate.pending or self._publisher.waits or self._left_over

    def _made(self, resume_from: Path | None) -> Pupil:
        pupil = self._make_pupil(self.settings, resume_from)
        if isinstance(pupil, Learner):
            pupil.watched_by(self.progress)
        return pupil

    def close(self) -> None:
        """Close the connections to vLLM and to the judge."""
        self._assembly.close()
        self._scorekeeper.close()
        self._gate.close()
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
            except (ForbiddenChange, UnknownRecord) as changed:  # a person, a deletion, or a leader that stood still
                overtaken += 1
                log.warning("event=turn_overtaken reason=%r", str(changed))
                if overtaken == _MOST_OVERTAKEN:
                    raise
                worked = False
            if not worked:
                self._stop.wait(self.settings.poll_interval_seconds)

    def turn(self, now: float) -> bool:
        """Do everything that is due once; return whether there was anything."""
        # Stillness is counted in what the proxies have shipped, not in what the clock says: a record may be on its way.
        alias = self.settings.model
        shipped = self._store.doors.shipped_until(alias, now, since=now - DOOR_SILENCE)
        self._store.trajectories.seal_rollouts(alias, shipped)
        self._store.trajectories.seal_idle(alias, shipped, self.settings.seal_after_idle_seconds)
        self._sentinel.look(now)
        if self._base.objection(now) is not None:  # what vLLM answers now is another model's
            return False
        decided = self._gate.turn(now)
        grouped = self._assembly.turn(now, shipped)
        scored = self._score(now)
        trained = self._warm_start(now) or self._train(now)
        if published := self._publish():
            self._prune()
        self._drain(now)
        return decided or grouped or scored or trained or published

    def _score(self, now: float) -> bool:
        self._scorekeeper.ask(self._backlog.to_judge(now), self._transcripts.read)
        scored = self._scorekeeper.collect(now, _JUDGE_PATIENCE)
        if self._patience is not None:
            self._rehearing.look(now)
            scored += self._rehearing.collect(now, _JUDGE_PATIENCE)
        return bool(scored)

    def _train(self, now: float) -> bool:
        if self._undecided:  # the next version is built on a decided one
            return False
        waiting = self._backlog.judged()
        if not waiting:
            self._first_judged = None
            return False
        self._first_judged = self._first_judged or now
        weight, wanted = self._backlog.weight(waiting), self.settings.groups_per_round
        self._gathering.at(min(weight, wanted), wanted)
        if not self._backlog.makes_a_round(weight, now - self._first_judged):
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
            candidate = self._school.hold_round(self.learner, newest, self._version)
            self._spoilt = False
        except TrainingDiverged as diverged:
            log.error("event=round_diverged reason=%r", str(diverged))
            return True
        except OutOfMemory as short:
            log.error("event=round_out_of_memory reason=%r", str(short))
            if not self._memory.failed():
                raise
            return True  # the next turn tries it in less memory
        self._first_judged = None
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
            version, resume_from = self._school.newest()
            self.learner.load(resume_from, learner_settings(wanted, self._memory.learner, len(material.rows)))
            imitation = Imitation(self._store, self._school, self.settings.model)
            imitation.hold(self.learner, material, wanted, version, asked.id)
        except REFUSALS as refusal:
            self._warm_starts.refuse(asked, str(refusal))
        return True

    def _renew(self) -> None:
        """Put the learner where the newest commit is, if it holds steps of no commit, or misses those of one."""
        version, resume_from = self._school.newest()
        if self._spoilt or version != self._version:  # a version may have been rejected since
            self.learner.load(resume_from, self._memory.learner)
            self._version, self._spoilt = version, False

    def _publish(self) -> bool:
        """Publish the candidate whose turn it is; one that is being tried is published when that is over."""
        if self._gate.pending or (self._evaluations is not None and self._evaluations.busy):
            return False
        try:
            candidate = next_candidate(self._store, self.settings.model)
            self._left_over = False
            if candidate is None:
                self._publisher.waits = False
                return False
            if self._base.objection(time.time(), fresh=True) is not None:
                self._left_over = True
                return False
            self._renew()  # after a warm start, or a round that came to nothing
            self._publisher.publish(candidate, self._school.probes(candidate), self.learner)
        except ForbiddenChange as overtaken:  # a person decided meanwhile
            log.info("event=publish_overtaken reason=%r", str(overtaken))
        self._prune_due = True
        self.metrics.evaluating(self._publisher.waits)
        return not self._publisher.waits

    def _best(self) -> list[int]:
        """Return the versions worth a look back, the best first; none where scores do not compare versions."""
        if self._relative:
            return []
        return best_first(self._store.groups.scored(self.settings.model, self._judge_version))

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
        self._prune_due = bool(in_use)
        if gone:
            log.info("event=versions_pruned alias=%s versions=%s", alias, ",".join(map(str, gone)))

    def _drain(self, now: float) -> None:
        if now - self._drained_at >= _DRAIN_EVERY:
            self._drained_at = now
            self._publisher.drain(now)
            if self._prune_due:  # also what was pinned, or what an outage or a kill left
                self._prune()
