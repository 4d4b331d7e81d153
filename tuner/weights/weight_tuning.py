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
maximum. Plan and progress are in the store, so an interrupted run resumes. This module trains nothing: the trainer
does, with the same proof, release checks and sentinel as in production.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from ratchet.store.errors import InvalidTransition
from ratchet.store.operation_records import Rollout, Tuning
from ratchet.store.reasons import describe_untrained, drop_meaning
from ratchet.store.states import PolicyState, RoundState, TrajectoryState, TuningState
from ratchet.store.store import Store
from ratchet.trainer.errors import TuningError
from ratchet.trainer.rounds.backlog import is_drained
from ratchet.trainer.settings.trainer_settings import TrainerSettings, WarmStartSettings
from ratchet.trainer.statistics import CandidateScore, Compared, ComparisonVerdict, compare, rank
from ratchet.trainer.tasks import TEST, Task
from ratchet.trainer.warm_start import COLLECTED, warm_start_metrics
from ratchet.tuner.reports import TuningResult, task_set
from ratchet.tuner.rollouts.runner import RolloutJob, RolloutRunner, final_rollouts, pending_jobs
from ratchet.tuner.rollouts.scoring import RolloutTools
from ratchet.tuner.selection import commonest, marks_of
from ratchet.tuner.tasks import TaskFamily, TaskMix

BASELINE, WARM_START, ROUNDS = "baseline", "warm_start", "rounds"  # stages in order
VALIDATION = "validation"  # the split that decides when to stop and which version is best
LIVE = "live"  # candidate name of rollouts that are trained


class WeightsPlan(BaseModel):
    """Parameters of a weight tuning."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    families: tuple[str, ...] = Field(min_length=1)  # task sets: SOURCE or NAME=SOURCE:WEIGHT
    workflow: str
    family_workflows: Mapping[str, str] = Field(default_factory=dict)  # of families with an own agent
    eval_workflow: str | None = None  # the agent of the evaluations, such as a greedy one
    rounds: int = Field(20, ge=0)
    tasks_per_round: int = Field(16, ge=1)
    attempts: int = Field(8, ge=2)  # at each task: the trainer's group size
    eval_every: int = Field(5, ge=1)  # rounds
    eval_tasks: int | None = Field(None, ge=2)  # maximum of each family; None: all
    validation_tasks: int = Field(32, ge=1)  # maximum of each family
    eval_attempts: int = Field(1, ge=1)
    patience: int = Field(3, ge=0)  # evaluations without a gain; 0: no limit
    collect: int = Field(0, ge=0)  # rounds of rollouts for a warm start, not trained
    warm_start: WarmStartSettings | None = None
    max_trainer_wait_seconds: float = Field(60.0, gt=0)  # before an evaluation
    seed: int = Field(0, ge=0)
    run_judge: Mapping[str, Any] | None = None  # functions of the calling process, in place of the trainer's judge


class Evaluated(CandidateScore, frozen=True, kw_only=True):
    """The score of a version on a split, and the difference to the baseline."""

    candidate: str = ""  # the version by its name; older runs did not store it
    version: int
    split: str = TEST  # older runs evaluated on it alone
    round: int  # training rounds before the evaluation
    rollouts: int  # training rollouts before the evaluation
    families: Mapping[str, float | None]  # mean by family
    against_baseline: Compared | None = None  # None for the baseline itself

    def describe(self) -> str:
        mean = "no score" if self.mean is None else f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f})"
        against = "" if self.against_baseline is None else f"; against the baseline {self.against_baseline.describe()}"
        return mean + against


class WeightsProgress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Progress of a run."""

    stage: str = BASELINE
    baseline: int = 0  # live version at the start
    rounds: int = 0  # finished
    evaluations: tuple[Evaluated, ...] = ()
    warm_start: Mapping[str, Any] | None = None  # metrics of the warm start
    notes: tuple[str, ...] = ()
    wall_seconds: float = 0.0  # before the last interruption

    @property
    def validated(self) -> tuple[Evaluated, ...]:
        """Evaluations on validation tasks, oldest first."""
        return tuple(one for one in self.evaluations if one.split == VALIDATION) or self.evaluations

    @property
    def best(self) -> Evaluated:
        """The validation with the highest mean; the earliest on ties."""
        return max(self.validated, key=lambda one: float("-inf") if one.mean is None else one.mean)


def config_of(plan: WeightsPlan) -> dict[str, Any]:
    return plan.model_dump(mode="json", exclude_none=True)


def plan_of(tuning: Tuning) -> WeightsPlan:
    """Return the plan of a run. Raises TuningError if the run is of another method."""
    if tuning.kind != "weights":
        raise TuningError(f"tuning {tuning.id} is a {tuning.kind} run, not a weights run")
    return WeightsPlan.model_validate(tuning.config)


_Value = TypeVar("_Value")

ROUNDS_DONE = "rounds"  # name of the progress bar
_POLL_SECONDS = 0.2  # seconds
_MAX_ROUNDS = 1000  # newest ones of the trainer that are read


@dataclass
class WeightsTuning:
    """One run. `watch` is called regularly and raises if a service has ended; `report` receives progress messages."""

    tools: RolloutTools
    tuning: Tuning
    families: Sequence[TaskFamily]
    trainer: TrainerSettings
    _: KW_ONLY
    evaluator: RolloutRunner | None = None
    failure_score: float = 0.0
    watch: Callable[[], None] = lambda: None
    report: Callable[[str], object] = lambda line: None

    def __post_init__(self) -> None:
        self._store, self._alias = self.tools.store, self.tuning.alias
        self._plan = plan = plan_of(self.tuning)
        self._evaluator = self.evaluator or self.tools.runner
        tests = {family.name: family.of(TEST, plan.eval_tasks) for family in self.families}
        tested = {task.id for tasks in tests.values() for task in tasks}
        self._split: dict[str, dict[str, list[Task]]] = {
            TEST: tests,
            VALIDATION: {one.name: one.validation(plan.validation_tasks, plan.seed, tested) for one in self.families},
        }
        self._mix = TaskMix(self.families, plan.seed, tested | {task.id for task in self._of_split(VALIDATION)})
        self._began = time.monotonic()
        self._state = msgspec.convert(self.tuning.result or {}, WeightsProgress)
        self._seconds_before = self._state.wall_seconds

    def _of_split(self, split: str) -> list[Task]:
        return [task for tasks in self._split[split].values() for task in tasks]

    async def run(self) -> TuningResult:
        """Run to completion. Raises TuningError, TooManyFailures, and the errors of `watch`."""
        if self._state.stage == BASELINE:
            await self._baseline()
        if self._state.stage == WARM_START:
            await self._warm_start()
        work = self.tools.progress.begin(ROUNDS_DONE, self._plan.rounds)
        while True:
            work.at(self._state.rounds, self._plan.rounds)
            if self._is_due():
                await self._wait_for_trainer()
                await self._evaluate(self._live(), VALIDATION)
            if self._state.rounds >= self._plan.rounds or self._out_of_patience():
                break
            jobs = self._jobs(self._plan.collect + self._state.rounds, LIVE, None, "live", self._state.rounds)
            await self._rollouts(self.tools.runner, jobs)
            self._update(rounds=self._state.rounds + 1)
        work.end()
        self._select_best_version()
        await self._evaluate(self._live(), TEST)
        return self._result()

    async def _baseline(self) -> None:
        if not self._state.evaluations:
            self._update(baseline=self._live())
        for split in (VALIDATION, TEST):
            await self._evaluate(self._state.baseline, split)
        warms_up, model = self._plan.warm_start is not None, self._name(self._state.baseline)
        if warms_up and self._plan.collect:
            rounds = range(self._plan.collect)
            jobs = [job for number in rounds for job in self._jobs(number, COLLECTED, model, "eval", number)]
            await self._scored(await self._rollouts(self.tools.runner, jobs))
        self._update(stage=WARM_START if warms_up else ROUNDS)

    def _jobs(self, drawn: int, candidate: str, model: str | None, purpose: str, step: int) -> list[RolloutJob]:
        """Return the rollouts of one round: the attempts at the tasks of the `drawn`-th draw."""
        return [
            RolloutJob(task, attempt, candidate, model, purpose, step=step)
            for task in self._mix.draw(drawn, self._plan.tasks_per_round)
            for attempt in range(self._plan.attempts)
        ]

    async def _warm_start(self) -> None:
        """Wait for the trainer, which reads the stage from the store. Raises TuningError if it refuses."""
        while (found := warm_start_metrics(self._store, self._alias, self.tuning.id)) is None:
            ended = self._store.tunings.get(self.tuning.id)
            if ended.state is not TuningState.RUNNING:
                raise TuningError(ended.error or f"tuning {ended.id} was {ended.state}")
            await self._pause()
        version, metrics = found
        while (policy := self._store.policies.get(self._alias, version)).state is PolicyState.CANDIDATE:
            if (held := self._store.policies.awaiting_approval(self._alias)) is not None and held.version == version:
                self._note(f"the warm start's version {version} needs approval: see `ratchet policies show`")
                break
            await self._pause()
        self._update(warm_start=dict(metrics) | {"version": version, "state": str(policy.state)})
        if policy.state in (PolicyState.REJECTED, PolicyState.UNPROVEN):
            reason = policy.evidence.get("reason", "it was worse in the evaluation")
            what = "rejected" if policy.state is PolicyState.REJECTED else "not proven; the rounds continue from it"
            self._note(f"the warm start's version was {what}: {reason}")
        else:
            await self._evaluate(version, VALIDATION)
        self._update(stage=ROUNDS)

    async def _evaluate(self, version: int, split: str) -> None:
        """Evaluate a version on a split and store the result; rollouts that were scored before are reused.

        Does nothing if a killed run has stored this evaluation, or if the version was evaluated on the test tasks.
        """
        known = [one for one in self._state.evaluations if (one.version, one.split) == (version, split)]
        if known and (split == TEST or self._state.rounds in {one.round for one in known}):
            return
        name, baseline = self._name(version), self._state.baseline
        jobs = [
            RolloutJob(task, attempt, name, name, "eval")
            for task in self._of_split(split)
            for attempt in range(self._plan.eval_attempts)
        ]
        await self._scored(await self._rollouts(self._evaluator, jobs))
        marks = self._marks(version, split)
        scored = self._score(marks, name)
        if scored.mean is None and version == baseline:
            failures = (one.failure or one.judge_failure for one in final_rollouts(self._of(name)))
            raise TuningError(f"no rollout on the {split} tasks could be scored: {commonest(failures)}")
        found = Evaluated(
            **msgspec.structs.asdict(scored), version=version, split=split, round=self._state.rounds,
            rollouts=len(final_rollouts(self._of(LIVE))),
            families={one: self._score(_of_family(marks, one)).mean for one in self._split[split]},
            against_baseline=None if version == baseline else self._compared(version, baseline, split=split),
        )  # fmt: skip
        self._update(evaluations=(*self._state.evaluations, found))
        self.report(f"after {found.round} rounds, {name} on the {split} tasks: {found.describe()}")

    def _marks(self, version: int, split: str) -> dict[str, Any]:
        wanted = {task.id for task in self._of_split(split)}
        return marks_of(final_rollouts(one for one in self._of(self._name(version)) if one.task_id in wanted))

    def _score(self, marks: Mapping[str, Any], name: str = "") -> CandidateScore:
        return rank({name: marks}, failure_score=self.failure_score).scores[0]

    def _compared(self, version: int, against: int, family: str | None = None, split: str = TEST) -> Compared:
        ours, theirs = (_of_family(self._marks(one, split), family) for one in (version, against))
        names = (self._name(version), self._name(against))
        return compare(ours, theirs, names=names, failure_score=self.failure_score)

    def _is_due(self) -> bool:
        """Whether an evaluation is due after the rounds so far."""
        done = self._state.rounds
        ends = done > 0 and (done % self._plan.eval_every == 0 or done == self._plan.rounds)
        return ends and self._state.validated[-1].round != done

    def _out_of_patience(self) -> bool:
        """Whether the last evaluations brought no gain."""
        patience, state = self._plan.patience, self._state
        if not patience or len(state.validated) - 1 - state.validated.index(state.best) < patience:
            return False
        self._note(
            f"stopped after round {state.rounds}: {patience} evaluations without a gain over "
            f"{self._name(state.best.version)}"
        )
        return True

    def _select_best_version(self) -> None:
        """Roll back the live version if it is worse than the best one on validation tasks."""
        live, best = self._live(), self._state.best.version
        if best >= live or live not in {one.version for one in self._state.validated}:
            return
        found = self._compared(live, best, split=VALIDATION)
        if found.verdict is not ComparisonVerdict.WORSE:
            return
        reason = (
            f"tuning {self.tuning.id}: on the validation tasks it is worse than {self._name(best)}: {found.describe()}"
        )
        try:
            self._store.policies.roll_back(
                self._alias, best, {"tuning": msgspec.to_builtins(found)}, by="tuner", reason=reason
            )
            self._note(f"rolled back from {self._name(live)} to {self._name(best)}: {found.describe()}")
        except InvalidTransition as refusal:  # its folder was pruned, or a user changed the version
            self._note(
                f"{self._name(live)} is worse than {self._name(best)} ({found.describe()}), but stays live: {refusal}"
            )

    async def _rollouts(self, runner: RolloutRunner, jobs: Sequence[RolloutJob]) -> list[Rollout]:
        """Run the missing rollouts; return the final ones of all jobs."""
        candidates = {job.candidate for job in jobs}
        known = [one for name in candidates for one in self._of(name)]
        if missing := pending_jobs(jobs, known):
            await self._run_watched(runner.run(missing, self.tuning.id))
        return final_rollouts((one for name in candidates for one in self._of(name)), jobs)

    async def _scored(self, rollouts: Sequence[Rollout]) -> None:
        if unscored := [one for one in rollouts if one.score is None]:  # again, if the judge has failed
            await self._run_watched(asyncio.to_thread(self.tools.scorer.score, unscored))

    async def _wait_for_trainer(self) -> None:
        """Wait until the trainer has nothing left to train on, up to the limit."""
        self.report(f"after {self._state.rounds} rounds: waiting for the trainer")
        until = time.monotonic() + self._plan.max_trainer_wait_seconds
        size, groups = self.trainer.num_generations, self.trainer.groups_per_round
        while time.monotonic() < until:
            await self._pause()
            if is_drained(self._store, self._alias, num_generations=size, groups_per_round=groups):
                return

    async def _pause(self) -> None:
        self.watch()
        await asyncio.sleep(_POLL_SECONDS)

    async def _run_watched(self, work: Coroutine[Any, Any, _Value]) -> _Value:
        """Await the coroutine; stop if `watch` raises."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=_POLL_SECONDS))[0]:
                self.watch()
            return task.result()
        finally:
            task.cancel()

    def _note(self, text: str) -> None:
        self._update(notes=(*self._state.notes, text))

    def _update(self, **changes: Any) -> None:
        seconds = self._seconds_before + time.monotonic() - self._began
        self._state = msgspec.structs.replace(self._state, wall_seconds=seconds, **changes)
        stored = msgspec.to_builtins(self._state) | {"stage": self._state.stage}
        self._store.tunings.update(self.tuning.id, stored)

    def _of(self, candidate: str) -> list[Rollout]:
        return self._store.rollouts.of_tuning(self.tuning.id, candidate)

    def _live(self) -> int:
        return self._store.policies.live()[self._alias].version

    def _name(self, version: int) -> str:
        return f"{self._alias}@{version}"

    def _result(self) -> TuningResult:
        """Return gain, cost, learning curve and gains by family."""
        store, plan, state, run = self._store, self._plan, self._state, self.tuning.id
        final, baseline = self._live(), state.baseline
        tested = [one for one in state.evaluations if one.split == TEST]
        is_measured = final in {one.version for one in tested}
        gain = self._compared(final, baseline) if is_measured and final != baseline else None
        store.rollouts.count_tokens([one.id for one in store.rollouts.of_tuning(run) if not one.planned])
        made = store.rollouts.of_tuning(run)
        rollouts = final_rollouts(made)
        ours = [] if state.warm_start is None else ["SFT"]
        if state.rounds:
            estimator, loss = self.trainer.advantage_estimator, self.trainer.learner.loss_type
            ours.append(f"{estimator} with {loss}, {state.rounds} rounds")
        notes = state.notes if is_measured else (*state.notes, f"{self._name(final)} was not evaluated")
        trained = _trained(store, self.tuning) if state.rounds else None
        rewards = _rewards(store, (one for one in rollouts if one.candidate == LIVE))
        tests, families = self._of_split(TEST), list(self._split[TEST]) if gain is not None else []
        own = [f"{name}={spec}" for name, spec in sorted(plan.family_workflows.items())]
        return TuningResult(
            method="weights",
            technique=" -> ".join(ours) or "evaluation only",
            alias=self._alias,
            task_set=task_set(", ".join(plan.families), "test", [task.id for task in tests]),
            judge=self.tools.scorer.name,
            workflow="; ".join([plan.workflow, *own]),
            attempts=plan.eval_attempts,
            baseline=self._name(baseline),
            best=self._name(final) if gain is not None and gain.verdict is ComparisonVerdict.BETTER else None,
            gain=gain,
            spent=self.tools.spent(made),
            wall_seconds=state.wall_seconds,
            promoted=self._name(final) if final != baseline else None,
            notes=(*notes, *_failures(rollouts), *(_training_notes(trained) if trained is not None else ())),
            details={
                "curve": [msgspec.to_builtins(one) for one in state.validated],
                "test": [msgspec.to_builtins(one) for one in tested],
                "training": [
                    {"round": number, "family": family, "reward": mean, "judged": count}
                    for (number, family), (mean, count) in rewards.items()
                ],
                "families": {one: msgspec.to_builtins(self._compared(final, baseline, one)) for one in families},
                "warm_start": state.warm_start,
                "rounds": state.rounds,
                "trained": trained,
            },
        )  # fmt: skip


def _family_of(task_id: str) -> str:
    return task_id.rpartition("/")[0]


def _of_family(marks: Mapping[str, Any], family: str | None) -> dict[str, Any]:
    return {task: mark for task, mark in marks.items() if family in (None, _family_of(task))}


def _rewards(store: Store, rollouts: Iterable[Rollout]) -> dict[tuple[int, str], tuple[float, int]]:
    """Return the mean score and the number of judged training rollouts, by round and family."""
    by_id = {one.id: (one.step, _family_of(one.task_id)) for one in rollouts}
    names = list(by_id)
    scores: dict[tuple[int, str], list[float]] = {}
    for start in range(0, len(names), 500):
        for name, verdict in store.groups.verdicts(names[start : start + 500]).items():
            if verdict.score is not None:
                scores.setdefault(by_id[name], []).append(verdict.score)
    return {place: (sum(found) / len(found), len(found)) for place, found in sorted(scores.items())}


def _trained(store: Store, tuning: Tuning) -> dict[str, Any]:
    """Return what the trainer made of the rounds: its own rounds since the run began, and the rollouts' outcomes."""
    made = [one for one in store.rounds.page(tuning.alias, _MAX_ROUNDS) if one.started_at >= tuning.started_at]
    committed = [one for one in made if one.state is RoundState.COMMITTED and "warm_start" not in one.metrics]
    abandoned = [one for one in made if one.state is RoundState.ABANDONED]
    untrained: Counter[str] = Counter()
    for one in committed:
        untrained.update(one.metrics.get("untrained_tokens") or {})
    return {
        "committed": len(committed),
        "abandoned": len(abandoned),
        "abandoned_because": abandoned[0].reason if abandoned else None,
        "rollouts": store.rollouts.training_outcomes(tuning.id, LIVE),
        "untrained_tokens": dict(untrained),
    }


def _training_notes(trained: Mapping[str, Any]) -> Iterator[str]:
    """Yield how many rounds and rollouts were trained and why the others were not, with the commonest remedy."""
    left = Counter(trained["rollouts"])
    total, used = left.total(), left.pop(TrajectoryState.TRAINED, 0)
    counts = ", ".join(f"{count} {reason}" for reason, count in left.most_common())
    note = f"rounds of the trainer: {trained['committed']} committed, {trained['abandoned']} abandoned"
    note += f"; {used} of {total} training rollouts were trained" + (f", the others not: {counts}" if counts else "")
    remedy = drop_meaning(left.most_common(1)[0][0]) if left else None
    yield f"{note} ({remedy})" if remedy else note
    if trained["abandoned_because"]:
        yield f"the last abandoned round: {trained['abandoned_because']}"
    if trained["untrained_tokens"]:
        yield f"tokens of committed rounds, {describe_untrained(trained['untrained_tokens'])}"


def _failures(rollouts: Sequence[Rollout]) -> Iterator[str]:
    """Yield the commonest failures of the agent and of the judge."""
    if failure := commonest(one.failure for one in rollouts):
        failed = sum(one.failure is not None for one in rollouts)
        yield f"{failed} of {len(rollouts)} rollouts failed, most often with {failure}"
    if failure := commonest(one.judge_failure for one in rollouts):
        yield f"the judge failed, most often with {failure}"
