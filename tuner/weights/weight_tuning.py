"""Weight tuning: rollouts of training tasks go through the proxy; the trainer learns from them as from any traffic.

    stage       work                                                            waits for
    ----------  --------------------------------------------------------------  ----------------------------------
    baseline    the live version on the validation and test tasks; training     the judge
                tasks without training, if a warm start needs them
    warm start  the trainer runs SFT on good trajectories                       the proven version
    rounds      training tasks by family weight, several attempts each; the     the trainer, before an evaluation
                live version on the validation tasks at intervals; finally the
                live version, once, on the test tasks

Guarantees: validation and test tasks are never trained and share no content with each other or the training tasks;
versions are compared task by task. The run stops when validation no longer improves and rolls back a version that is
worse than the best one on validation tasks, so test tasks decide nothing and the gain on them is not a selected
maximum. Progress is in the store, so an interrupted run resumes. This module trains nothing: the trainer does, with
the same proof, release checks and sentinel as in production.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from ratchet.store.errors import InvalidTransition
from ratchet.store.operation_records import Rollout, Tuning
from ratchet.store.states import PolicyState, TuningState
from ratchet.store.store import Store
from ratchet.trainer.controller.rounds.backlog import is_drained
from ratchet.trainer.controller.warm_start import COLLECTED, warm_start_metrics
from ratchet.trainer.errors import TuningError
from ratchet.trainer.observability.progress import Progress
from ratchet.trainer.settings.trainer_settings import TrainerSettings
from ratchet.trainer.statistics import Compared, ComparisonVerdict, compare, rank
from ratchet.trainer.tasks import TEST, Task
from ratchet.tuner.rollouts.runner import RolloutJob, RolloutRunner, final_rollouts, pending_jobs
from ratchet.tuner.rollouts.scoring import RolloutScorer
from ratchet.tuner.selection.choice import commonest, marks_of
from ratchet.tuner.tasks.task_mix import TaskFamily, TaskMix
from ratchet.tuner.weights.weights_plan import (
    BASELINE,
    LIVE,
    ROUNDS,
    VALIDATION,
    WARM_START,
    Evaluated,
    WeightsPlan,
    WeightsProgress,
    plain,
    plan_of,
    progress_of,
)

_Value = TypeVar("_Value")

ROUNDS_DONE = "rounds"  # name of the progress bar
_POLL_SECONDS = 0.2  # seconds


class WeightsTuning:
    """One run. `watch` is called regularly and raises if a service has ended; `report` receives progress messages."""

    def __init__(
        self,
        store: Store,
        tuning: Tuning,
        families: Sequence[TaskFamily],
        trainer: TrainerSettings,
        runner: RolloutRunner,
        scorer: RolloutScorer,
        *,
        evaluator: RolloutRunner | None = None,
        progress: Progress | None = None,
        failure_score: float = 0.0,
        watch: Callable[[], None] = lambda: None,
        report: Callable[[str], object] = lambda line: None,
    ) -> None:
        self._store = store
        self._tuning = tuning
        self._alias = tuning.alias
        self._plan: WeightsPlan = plan_of(tuning)
        self._trainer = trainer
        self._runner = runner
        self._evaluator = evaluator or runner
        self._scorer = scorer
        self._progress = progress or Progress()
        self._failure_score = failure_score
        self._watch = watch
        self._report = report
        tests = {family.name: family.of(TEST, self._plan.eval_tasks) for family in families}
        tested = {task.id for tasks in tests.values() for task in tasks}
        seed, limit = self._plan.seed, self._plan.validation_tasks
        self._split: dict[str, dict[str, list[Task]]] = {
            TEST: tests,
            VALIDATION: {family.name: family.validation(limit, seed, tested) for family in families},
        }
        self._mix = TaskMix(families, seed, tested | {task.id for task in self._of_split(VALIDATION)})
        self._began = time.monotonic()
        self._state: WeightsProgress = progress_of(tuning)
        self._seconds_before = self._state.wall_seconds

    @property
    def state(self) -> WeightsProgress:
        """The stored progress."""
        return self._state

    @property
    def tests(self) -> list[Task]:
        """The test tasks of all families."""
        return self._of_split(TEST)

    def _of_split(self, split: str) -> list[Task]:
        return [task for tasks in self._split[split].values() for task in tasks]

    async def run(self) -> WeightsProgress:
        """Run to completion. Raises TuningError, TooManyFailures, and the errors of `watch`."""
        if self._state.stage == BASELINE:
            await self._baseline()
        if self._state.stage == WARM_START:
            await self._warm_start()
        work = self._progress.begin(ROUNDS_DONE, self._plan.rounds)
        while True:
            work.at(self._state.rounds, self._plan.rounds)
            if self._is_due():
                await self._wait_for_trainer()
                await self._evaluate(self._live(), VALIDATION)
            if self._state.rounds >= self._plan.rounds or self._out_of_patience():
                break
            await self._rollouts(self._runner, self._round(self._state.rounds))
            self._update(rounds=self._state.rounds + 1)
        work.end()
        self._select_best_version()
        await self._evaluate(self._live(), TEST)
        return self._state

    def marks(self, version: int, split: str) -> dict[str, Any]:
        """Return the results of a version on a split, by task."""
        wanted = {task.id for task in self._of_split(split)}
        return marks_of(final_rollouts(one for one in self._of(self._name(version)) if one.task_id in wanted))

    def compared(self, version: int, against: int, family: str | None = None, split: str = TEST) -> Compared:
        """Compare two versions on a split, for one family or all."""
        sides = (self.marks(one, split) for one in (version, against))
        ours, theirs = (
            {task: marks for task, marks in side.items() if family is None or _family_of(task) == family}
            for side in sides
        )
        names = (self._name(version), self._name(against))
        return compare(ours, theirs, names=names, failure_score=self._failure_score)

    async def _baseline(self) -> None:
        if not self._state.evaluations:
            self._update(baseline=self._live())
        for split in (VALIDATION, TEST):
            await self._evaluate(self._state.baseline, split)
        if self._plan.warm_start is not None and self._plan.collect:
            jobs = [
                RolloutJob(task, attempt, COLLECTED, self._name(self._state.baseline), "eval", step=number)
                for number in range(self._plan.collect)
                for task in self._mix.draw(number, self._plan.tasks_per_round)
                for attempt in range(self._plan.attempts)
            ]
            await self._scored(await self._rollouts(self._runner, jobs))
        self._update(stage=WARM_START if self._plan.warm_start is not None else ROUNDS)

    async def _warm_start(self) -> None:
        """Wait for the trainer, which reads the stage from the store. Raises TuningError if it refuses."""
        while (found := warm_start_metrics(self._store, self._alias, self._tuning.id)) is None:
            ended = self._store.tunings.get(self._tuning.id)
            if ended.state is not TuningState.RUNNING:
                raise TuningError(ended.error or f"tuning {ended.id} was {ended.state}")
            await self._pause()
        version, metrics = found
        while (policy := self._store.policies.get(self._alias, version)).state is PolicyState.CANDIDATE:
            if (held := self._store.policies.awaiting_approval(self._alias)) is not None and held.version == version:
                waits = f"the warm start's version {version} needs approval: see `ratchet policies show`"
                self._update(notes=(*self._state.notes, waits))
                break
            await self._pause()
        self._update(warm_start=dict(metrics) | {"version": version, "state": str(policy.state)})
        if policy.state in (PolicyState.REJECTED, PolicyState.UNPROVEN):
            reason = policy.evidence.get("reason", "it was worse in the evaluation")
            what = "rejected" if policy.state is PolicyState.REJECTED else "not proven; the rounds continue from it"
            self._update(notes=(*self._state.notes, f"the warm start's version was {what}: {reason}"))
        else:
            await self._evaluate(version, VALIDATION)
        self._update(stage=ROUNDS)

    def _round(self, number: int) -> list[RolloutJob]:
        drawn = self._mix.draw(self._plan.collect + number, self._plan.tasks_per_round)
        return [
            RolloutJob(task, attempt, LIVE, None, "live", step=number)
            for task in drawn
            for attempt in range(self._plan.attempts)
        ]

    async def _evaluate(self, version: int, split: str) -> None:
        """Evaluate a version on a split and store the result; rollouts that were scored before are reused.

        Does nothing if a killed run has stored this evaluation, or if the version was evaluated on the test tasks.
        """
        known = [one for one in self._state.evaluations if (one.version, one.split) == (version, split)]
        if known and (split == TEST or self._state.rounds in {one.round for one in known}):
            return
        jobs = [
            RolloutJob(task, attempt, self._name(version), self._name(version), "eval")
            for task in self._of_split(split)
            for attempt in range(self._plan.eval_attempts)
        ]
        await self._scored(await self._rollouts(self._evaluator, jobs))
        marks = self.marks(version, split)
        scored = rank({"it": marks}, failure_score=self._failure_score).scores[0]
        baseline = self._state.baseline
        if scored.mean is None and version == baseline:
            failures = (one.failure or one.judge_failure for one in final_rollouts(self._of(self._name(version))))
            raise TuningError(f"no rollout on the {split} tasks could be scored: {commonest(failures)}")
        found = Evaluated(
            version=version,
            split=split,
            round=self._state.rounds,
            rollouts=len(final_rollouts(self._of(LIVE))),
            tasks=scored.tasks,
            mean=scored.mean,
            low=scored.low,
            high=scored.high,
            failed=scored.failed,
            unjudged=scored.unjudged,
            families={name: self._family_mean(marks, name) for name in self._split[split]},
            against_baseline=None if version == baseline else self.compared(version, baseline, split=split),
        )
        self._update(evaluations=(*self._state.evaluations, found))
        self._report(f"after {found.round} rounds, {self._name(version)} on the {split} tasks: {found.describe()}")

    def _family_mean(self, marks: Mapping[str, Any], family: str) -> float | None:
        own = {task: mark for task, mark in marks.items() if _family_of(task) == family}
        return rank({family: own}, failure_score=self._failure_score).scores[0].mean

    def _is_due(self) -> bool:
        """Whether an evaluation is due after the rounds so far."""
        done = self._state.rounds
        ends = done > 0 and (done % self._plan.eval_every == 0 or done == self._plan.rounds)
        return ends and self._state.validated[-1].round != done

    def _out_of_patience(self) -> bool:
        """Whether the last evaluations brought no gain."""
        patience = self._plan.patience
        if not patience or self._state.evaluations_without_gain < patience:
            return False
        best = self._state.best
        self._update(
            notes=(
                *self._state.notes,
                f"stopped after round {self._state.rounds}: {patience} evaluations without a gain over "
                f"{self._name(best.version)}",
            )
        )
        return True

    def _select_best_version(self) -> None:
        """Roll back the live version if it is worse than the best one on validation tasks."""
        live, best = self._live(), self._state.best.version
        if best >= live or live not in {one.version for one in self._state.validated}:
            return
        found = self.compared(live, best, split=VALIDATION)
        if found.verdict is not ComparisonVerdict.WORSE:
            return
        reason = (
            f"tuning {self._tuning.id}: on the validation tasks it is worse than {self._name(best)}: {found.describe()}"
        )
        try:
            self._store.policies.roll_back(
                self._alias, best, {"tuning": msgspec.to_builtins(found)}, by="tuner", reason=reason
            )
            note = f"rolled back from {self._name(live)} to {self._name(best)}: {found.describe()}"
        except InvalidTransition as refusal:  # its folder was pruned, or a user changed the version
            note = (
                f"{self._name(live)} is worse than {self._name(best)} ({found.describe()}), but stays live: {refusal}"
            )
        self._update(notes=(*self._state.notes, note))

    async def _rollouts(self, runner: RolloutRunner, jobs: Sequence[RolloutJob]) -> list[Rollout]:
        """Run the missing rollouts; return the final ones of all jobs."""
        candidates = {job.candidate for job in jobs}
        known = [one for name in candidates for one in self._of(name)]
        if missing := pending_jobs(jobs, known):
            await self._run_watched(runner.run(missing, self._tuning.id))
        places = {job.key for job in jobs}
        made = (one for name in candidates for one in final_rollouts(self._of(name)))
        return [one for one in made if (one.candidate, one.task_id, one.attempt, one.step) in places]

    async def _scored(self, rollouts: Sequence[Rollout]) -> None:
        if unscored := [one for one in rollouts if one.score is None]:  # again, if the judge has failed
            await self._run_watched(asyncio.to_thread(self._scorer.score, unscored))

    async def _wait_for_trainer(self) -> None:
        """Wait until the trainer has nothing left to train on, up to the limit."""
        self._report(f"after {self._state.rounds} rounds: waiting for the trainer")
        until = time.monotonic() + self._plan.max_trainer_wait_seconds
        size, groups = self._trainer.num_generations, self._trainer.groups_per_round
        while time.monotonic() < until:
            await self._pause()
            if is_drained(self._store, self._alias, num_generations=size, groups_per_round=groups):
                return

    async def _pause(self) -> None:
        self._watch()
        await asyncio.sleep(_POLL_SECONDS)

    async def _run_watched(self, work: Coroutine[Any, Any, _Value]) -> _Value:
        """Await the coroutine; stop if `watch` raises."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=_POLL_SECONDS))[0]:
                self._watch()
            return task.result()
        finally:
            task.cancel()

    def _update(self, **changes: Any) -> None:
        """Update the stored progress."""
        seconds = self._seconds_before + time.monotonic() - self._began
        self._state = msgspec.structs.replace(self._state, wall_seconds=seconds, **changes)
        self._store.tunings.update(self._tuning.id, plain(self._state))

    def _of(self, candidate: str) -> list[Rollout]:
        return self._store.rollouts.of_tuning(self._tuning.id, candidate)

    def _live(self) -> int:
        return self._store.policies.live()[self._alias].version

    def _name(self, version: int) -> str:
        return f"{self._alias}@{version}"


def _family_of(task_id: str) -> str:
    return task_id.rpartition("/")[0]


def rewards(store: Store, rollouts: Iterable[Rollout]) -> dict[tuple[int, str], tuple[float, int]]:
    """Return the mean score and the number of judged training rollouts, by round and family."""
    by_id = {one.id: (one.step, _family_of(one.task_id)) for one in rollouts}
    names = list(by_id)
    scores: dict[tuple[int, str], list[float]] = {}
    for start in range(0, len(names), 500):
        for name, verdict in store.groups.verdicts(names[start : start + 500]).items():
            if verdict.score is not None:
                scores.setdefault(by_id[name], []).append(verdict.score)
    return {place: (sum(found) / len(found), len(found)) for place, found in sorted(scores.items())}
