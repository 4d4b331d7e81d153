"""One run of prompt tuning: determine the seed prompt, search until the budget ends, compare on held-out tasks.

    seed        the agent's own system prompt, observed in two rollouts, or the user's
    search      an optimizer proposes prompts; training and validation tasks score them; the best on validation is kept
    held out    seed and best prompt on tasks that the search never saw: a paired comparison, which decides alone

Guarantees: the three sets of tasks are disjoint by content, and the search never sees a held-out task; an interrupted
run resumes and keeps what it paid for; the verdict is `better` or `worse` only if the interval excludes zero for every
possible score of unjudged rollouts.

`tunings.config` holds the request without keys, so that the id is enough to resume the run. While it runs,
`tunings.result` holds the answers of the reflection model and the judge's explanations.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Literal

from msgspec.structs import replace

from ratchet.store.operation_records import Rollout, Tuning
from ratchet.store.records import JudgeRequest, Verdict
from ratchet.trainer.errors import BudgetExceeded, SettingError, TaskSetError, TooManyFailures, TuningError, Unjudged
from ratchet.trainer.judges.language_model import LanguageModel
from ratchet.trainer.judges.transcript_json import shortened
from ratchet.trainer.settings.judge_specs import ModelSpec
from ratchet.trainer.statistics import Compared, ComparisonVerdict, compare
from ratchet.trainer.tasks import TEST, TRAIN, Task, TaskSet
from ratchet.tuner.prompts.optimizer import (
    REFLECTION_MINIBATCH_SIZE,
    PromptOptimizer,
    Reflection,
    Search,
    load_optimizer,
)
from ratchet.tuner.prompts.reflection_model import Answered, ReflectionModel
from ratchet.tuner.prompts.trials import (
    MAX_FEEDBACK_CHARS,
    PROBES,
    SEED,
    Budget,
    SeedPrompt,
    Trials,
    Tried,
    captured,
    given,
    serving,
)
from ratchet.tuner.reports import TuningResult, plain, task_set
from ratchet.tuner.rollouts.prices import Money, RolloutCost, busy_seconds
from ratchet.tuner.rollouts.runner import RolloutJob
from ratchet.tuner.rollouts.scoring import RolloutTools
from ratchet.tuner.settings import (
    MIN_HELD_OUT_TASKS,
    MIN_TRAIN_TASKS,
    MIN_VALIDATION_TASKS,
    SEARCH_ROLLOUTS,
    PromptSettings,
    TunerSettings,
)
from ratchet.tuner.tasks import VALIDATION

log = logging.getLogger(__name__)

PROMPT_TUNING = "prompt tuning"  # name of the progress bar: rollouts of the budget
_MAX_HELD_OUT_TASKS: Final = 100  # taken from the training split if there is no test split and no number is set
_MAX_ROWS = 20_000  # read from a split
_MAX_RECORDED_CHARS = 2_000  # of a tried prompt in the record
_MAX_PROMPTS_RECORDED = 200

PromptVerdict = Literal["better", "no better", "worse", "inconclusive"]


@dataclass(frozen=True, slots=True)
class Sets:
    """Task ids in the order of use."""

    train: tuple[str, ...]
    validation: tuple[str, ...]
    held_out: tuple[str, ...]


def divide(
    tasks: Iterable[Task], test: Iterable[Task], sizes: PromptSettings, seed: int, validation: Iterable[Task] = ()
) -> Sets:
    """Return the three sets from a training, a test and a validation split. Raises TaskSetError.

    An empty split is replaced by a part of `tasks`; a task in two splits is held out. The same content and seed give
    the same sets. Pure.
    """
    held_out = list(dict.fromkeys(task.id for task in test))  # in the same order as other methods
    checked = _shuffled(validation, seed, held_out)
    rest = _shuffled(tasks, seed, {*held_out, *checked})
    if not held_out:
        share = max(MIN_HELD_OUT_TASKS, min(sizes.held_out_tasks or _MAX_HELD_OUT_TASKS, len(rest) // 2))
        held_out, rest = rest[:share], rest[share:]
    if not checked:
        share = max(MIN_TRAIN_TASKS, min(sizes.train_tasks, len(rest) // 2))
        rest, checked = rest[:share], rest[share:]
    sets = Sets(
        tuple(rest[: sizes.train_tasks]), tuple(checked[: sizes.validation_tasks]),
        tuple(held_out[: sizes.held_out_tasks]),
    )  # fmt: skip
    found = (len(sets.train), len(sets.validation), len(sets.held_out))
    least = (MIN_TRAIN_TASKS, MIN_VALIDATION_TASKS, MIN_HELD_OUT_TASKS)
    if any(one < minimum for one, minimum in zip(found, least, strict=True)):
        raise TaskSetError(
            f"prompt tuning needs at least {least[0]} training, {least[1]} validation and {least[2]} held-out tasks, "
            f"{sum(least)} different ones in all; this task set has {found[0]}, {found[1]} and {found[2]}: add tasks"
        )
    assert len({*sets.train, *sets.validation, *sets.held_out}) == sum(found), "the sets of tasks overlap"
    return sets


def _shuffled(tasks: Iterable[Task], seed: int, without: Container[str] = ()) -> list[str]:
    ids = sorted({task.id for task in tasks if task.id not in without})
    random.Random(f"prompt {seed}").shuffle(ids)
    return ids


def _divided(settings: TunerSettings, tasks: TaskSet) -> tuple[Sets, dict[str, Task]]:
    """Return the training, validation and held-out tasks of a set, and their rows by id. Raises TaskSetError."""
    splits, rows = tasks.splits(), dict[str, Task]()

    def read(split: str, limit: int | None = _MAX_ROWS) -> list[Task]:
        found = list(islice(tasks.rows(split), limit))
        rows.update({task.id: task for task in found})
        return found

    train = TRAIN if TRAIN in splits else splits[0]
    checked = next((split for split in splits if split in VALIDATION and split != train), None)
    test = read(TEST, settings.prompt.held_out_tasks) if TEST in splits and train != TEST else []
    checking = read(checked) if checked else []
    sets = divide(read(train), test, settings.prompt, settings.seed, checking)
    used = {*sets.train, *sets.validation, *sets.held_out}
    return sets, {task: row for task, row in rows.items() if task in used}


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """The tasks of a run, its settings, and the prompt to start from; None: the agent's own."""

    sets: Sets
    settings: TunerSettings
    seed_prompt: SeedPrompt | None = None

    @property
    def held_out_rollouts(self) -> int:
        return 2 * len(self.sets.held_out) * self.settings.attempts

    def check_budget(self, rollouts: int) -> None:
        """Raise TuningError if so many rollouts cannot give a result.

        The minimum is the seed and one proposal on validation tasks, and the comparison.
        """
        first = min(REFLECTION_MINIBATCH_SIZE, len(self.sets.train))
        least = PROBES + 2 * (first + len(self.sets.validation)) + self.held_out_rollouts
        if rollouts < least:
            raise TuningError(
                f"--max-rollouts {rollouts} is too small: these tasks need at least {least}, including "
                f"{self.held_out_rollouts} for the held-out comparison"
            )


@dataclass(frozen=True, slots=True)
class Found:
    """Result of a run. `best` is the seed's candidate if nothing was better on validation tasks."""

    seed: SeedPrompt
    baseline: str  # candidates: `seed`, or a prompt's id
    best: str
    prompt: str  # text of the best one
    verdict: PromptVerdict
    why: str
    gain: Compared | None  # on held-out tasks; None: nothing to compare
    tried: tuple[Tried, ...]
    ended_by: str  # why the search ended


@dataclass
class PromptTuning:
    """Runs one plan."""

    trials: Trials
    budget: Budget
    optimizer: PromptOptimizer
    reflection: Callable[[SeedPrompt], Reflection]
    plan: PromptPlan
    report: Callable[[str], None] = lambda line: None

    def run(self) -> Found:
        """Run until the budget ends. Raises TuningError, Unjudged, TuningError."""
        plan, trials = self.plan, self.trials
        plan.check_budget(self.budget.rollouts)
        self.budget.reserved_rollouts = plan.held_out_rollouts - trials.known(plan.sets.held_out)
        seed = self._seed()
        self.report(f"seed prompt: {seed.note}")
        ended_by = self._search(seed)
        tried = tuple(trials.tried(plan.sets.validation))
        baseline = trials.candidate(seed.text)
        best = self._best(tried, baseline)
        self.report(f"{len(tried)} prompts were tried on all validation tasks; {ended_by}")
        gain: Compared | None = None
        verdict: PromptVerdict = "no better"
        why = "no proposed prompt was better than the seed on the validation tasks"
        if best != baseline:
            gain = self._compared(best, baseline)
            verdict, why = judged(gain)
        log.info("event=prompt_tuned verdict=%s best=%s tried=%d", verdict.replace(" ", "_"), best, len(tried))
        return Found(seed, baseline, best, trials.prompt_of(best), verdict, why, gain, tried, ended_by)

    def _seed(self) -> SeedPrompt:
        plan, trials = self.plan, self.trials
        seed = plan.seed_prompt
        if seed is None:
            probed = plan.sets.train[:PROBES]
            trials.ensure_rollouts([(SEED, task, 0) for task in probed])
            seen = [one for task in probed if (one := trials.transcript(SEED, task)) is not None]
            failure = trials.failure_of_all(SEED, probed)
            if failure is not None and not seen:
                raise TooManyFailures(f"the agent failed before calling a model: {failure}")
            mode = plan.settings.prompt.mode
            seed = captured(seen, None if mode == "auto" else mode)
        trials.begin(seed.text, plan.sets.validation, is_agents_own=seed.is_agents_own, mode=seed.mode)
        return seed

    def _search(self, seed: SeedPrompt) -> str:
        """Search; return why it ended."""
        plan, trials = self.plan, self.trials
        try:
            trials.scores(seed.text, plan.sets.validation)
        except Unjudged as error:
            raise Unjudged(f"the seed prompt cannot be scored: {error}; see `ratchet judge try`") from error
        except BudgetExceeded as error:
            raise TuningError(f"the budget ended before the seed prompt was scored: {error}") from error
        failure = trials.failure_of_all(trials.candidate(seed.text), plan.sets.validation)
        if failure is not None:
            raise TooManyFailures(f"every rollout of the seed prompt failed: {failure}")
        search = Search(
            train=plan.sets.train, validation=plan.sets.validation, seed=plan.settings.seed,
            rollouts=self.budget.rollouts - plan.held_out_rollouts,
        )  # fmt: skip
        try:
            self.optimizer.optimize(seed.text, trials, self.reflection(seed), search)
        except BudgetExceeded as spent:
            return f"the budget ended: {spent}"
        return "the search ended"

    def _best(self, tried: Sequence[Tried], baseline: str) -> str:
        """Return the candidate with the highest validation mean; on ties the seed, then the first."""
        known = [(one.mean, one.candidate) for one in tried if one.mean is not None]
        most = max(mean for mean, _ in known)
        equal = [candidate for mean, candidate in known if mean == most]
        return baseline if baseline in equal else equal[0]

    def _compared(self, best: str, baseline: str) -> Compared:
        held_out, settings = self.plan.sets.held_out, self.plan.settings
        both = [[(one, task, n) for n in range(settings.attempts) for one in (baseline, best)] for task in held_out]
        enough = self.trials.affordable_rollouts(both)
        if enough < len(both):
            held_out = held_out[:enough]
            self.report(
                f"compared on {enough} of {len(both)} held-out tasks: interrupted rollouts used the budget of the rest"
            )
        try:  # together, so that a judge that ranks sees both
            self.trials.ensure_rollouts([place for task in both[:enough] for place in task], held_out=True)
        except BudgetExceeded as spent:
            self.report(f"the comparison on held-out tasks was cut short: {spent}")
        marks, against = (self.trials.marks(one, held_out, settings.attempts) for one in (best, baseline))
        return compare(marks, against, names=(best, baseline), failure_score=settings.failure_score)


def judged(gain: Compared) -> tuple[PromptVerdict, str]:
    """Return the verdict of a held-out comparison and its reason."""
    if gain.verdict is ComparisonVerdict.BETTER:
        return "better", "the interval on the held-out tasks lies above zero"
    if gain.verdict is ComparisonVerdict.WORSE:
        return (
            "worse",
            "the interval on the held-out tasks lies below zero: the prompt fits only the tasks of the search",
        )
    if gain.verdict is ComparisonVerdict.INCONCLUSIVE or gain.difference is None:
        return "inconclusive", f"{gain.unjudged} attempts are unjudged and could change the verdict"
    if gain.difference <= 0:
        return "no better", "on the held-out tasks it scores no higher than the seed prompt"
    return "inconclusive", "the interval on the held-out tasks contains zero: use more tasks or attempts"


def check(settings: TunerSettings, tasks: TaskSet) -> ModelSpec:
    """Check a request before it becomes a run; return the reflection model.

    Raises SettingError if a setting is missing, TuningError if the optimizer cannot be loaded, TuningError if
    the tasks need more rollouts, and TaskSetError if they cannot be read or are too few.
    """
    if settings.reflection is None:
        raise SettingError(
            "no reflection model is set: give --reflection-url and --reflection-model, or set tuner.reflection"
        )
    load_optimizer(settings.prompt.method)
    plan = PromptPlan(_divided(settings, tasks)[0], settings)
    if settings.prompt.max_rollouts is not None:
        plan.check_budget(settings.prompt.max_rollouts)
    return settings.reflection


def config_of(settings: TunerSettings, judge: Any, seed_prompt: str | None) -> dict[str, Any]:
    return {"tuner": settings.model_dump(mode="json"), "judge": judge, "seed_prompt": seed_prompt}


def run(
    tuning: Tuning, tools: RolloutTools, tasks: TaskSet, model: LanguageModel, report: Callable[[str], None]
) -> TuningResult:
    """Run or resume a tuning and store the result. Raises TuningError, StoreError.

    `tools.runner` must not retry: the budget counts every rollout. `model`: the reflection model.
    """
    result = _PromptRun(tuning, tools, tasks, model, report).run()
    tools.store.tunings.end(tuning.id, "done", plain(result))
    return result


class _PromptRun:
    """A run in this process."""

    def __init__(
        self, tuning: Tuning, tools: RolloutTools, tasks: TaskSet, model: LanguageModel, report: Callable[[str], None]
    ) -> None:
        self._tuning = tuning
        self._tools = tools
        self._model = model
        self._report = report
        self._settings = settings = TunerSettings.model_validate(tuning.config["tuner"])
        sets, self._tasks = _divided(settings, tasks)
        text, mode = tuning.config.get("seed_prompt"), settings.prompt.mode
        if text is None:
            seed = serving(tools.store, tuning.alias, None if mode == "auto" else mode)
        else:
            seed = given(str(text))
        self._plan = PromptPlan(sets, settings, seed)
        progress = tuning.result or {}
        self._answered: list[Answered] = list(progress.get("answered", ()))
        self._explanations: dict[str, str] = dict(progress.get("explanations", {}))
        rollouts = settings.prompt.max_rollouts or SEARCH_ROLLOUTS + self._plan.held_out_rollouts
        self._budget = Budget(rollouts, settings.prompt.max_total_tokens, concurrency=settings.concurrency)
        self._work = tools.progress.begin(PROMPT_TUNING, rollouts)

    def run(self) -> TuningResult:
        """Search, compare, and return the record."""
        tools, settings = self._tools, self._settings
        # The live version by name, so that no version in its ramp serves a part of the rollouts. A model of
        # `model_list` has no versions: it serves under its own name.
        live = tools.store.policies.live().get(self._tuning.alias)
        model = self._tuning.config.get("listed_model") if live is None else f"{live.alias}@{live.version}"
        with asyncio.Runner() as loop:  # one event loop for all rollouts, because the agent's clients belong to it

            def run_jobs(jobs: Sequence[RolloutJob]) -> list[Rollout]:
                made = loop.run(tools.runner.run(jobs, self._tuning.id, lambda rollout: self._work.add()))
                scored = self._scored(made)
                for one in scored:
                    if one.score is not None:
                        self._work.note(score=one.score)
                return scored

            tools.scorer.count_abandoned_tokens(self._tuning.id)
            trials = Trials(
                tools.store, self._tuning.id, self._tasks, run_jobs, self._scored, self._budget,
                failure_score=settings.failure_score, model=model, explanations=self._explanations,
            )  # fmt: skip
            self._work.at(self._budget.started_rollouts, self._budget.rollouts)
            tuned = PromptTuning(
                trials, self._budget, load_optimizer(settings.prompt.method), self._reflection, self._plan,
                self._report,
            )  # fmt: skip
            try:
                found = tuned.run()
            finally:
                self._work.end()
        return self._record(found, trials)

    def _scored(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Judge rollouts; keep the explanations on training tasks for reflection."""
        train = {one.id for one in rollouts if one.task_id in self._plan.sets.train}
        before = len(self._explanations)

        def keep_explanation(verdict: Verdict) -> None:
            if verdict.trajectory_id in train and verdict.explanation:
                self._explanations[verdict.trajectory_id] = shortened(verdict.explanation, MAX_FEEDBACK_CHARS)

        scored = self._tools.scorer.score(rollouts, keep_explanation)
        if len(self._explanations) > before:
            self._write_progress()
        return scored

    def _reflection(self, seed: SeedPrompt) -> ReflectionModel:
        return ReflectionModel(
            self._model, self._budget, mode=seed.mode, answered=tuple(self._answered), keep=self._keep,
        )  # fmt: skip

    def _keep(self, answered: Answered, judge_requests: Sequence[JudgeRequest]) -> None:
        self._answered.append(answered)
        self._write_progress()
        self._tools.store.groups.record_judge_requests(judge_requests)

    def _write_progress(self) -> None:
        self._tools.store.tunings.update(
            self._tuning.id, {"answered": self._answered, "explanations": self._explanations}
        )

    def _record(self, found: Found, trials: Trials) -> TuningResult:
        settings, method = self._settings, self._settings.prompt.method
        served = [replace(one, model=one.model or self._tuning.alias) for one in trials.rollouts]
        money = Money(self._budget.cost or 0.0, known=self._budget.cost is not None)
        reflections = RolloutCost(prompt_tokens=self._budget.reflection_tokens, money=money)
        return TuningResult(
            method="prompt",
            technique=f"{method.upper()}, {len(found.tried)} prompts",
            alias=self._tuning.alias,
            task_set=task_set(str(settings.tasks), TEST, self._plan.sets.held_out),
            judge=self._tools.scorer.name,
            workflow=str(settings.workflow),
            attempts=settings.attempts,
            baseline="the agent's own prompt" if found.baseline == SEED else found.baseline,
            best=found.best if found.verdict == "better" else None,
            gain=found.gain,
            spent=self._tools.spent(served) + reflections,
            wall_seconds=busy_seconds(trials.rollouts) + sum(float(one["seconds"]) for one in self._answered),
            notes=(found.seed.note, f"reflection by {self._model.spec.model}", found.why),
            details=self._details(found),
        )

    def _details(self, found: Found) -> dict[str, Any]:
        """Return the fields of the record that only prompt tuning has."""
        reflection, sets, budget = self._model.spec, self._plan.sets, self._budget
        return {
            "method": self._settings.prompt.method,
            "reflection": {"model": reflection.model, "base_url": reflection.base_url},
            "verdict": found.verdict,
            "why": found.why,
            "mode": found.seed.mode,
            "seed_prompt": found.seed.text,
            "seed_from": found.seed.note,
            "prompt_id": None if found.best == SEED else found.best,
            "prompt": found.prompt,
            "validation": [
                {"candidate": one.candidate, "mean": one.mean, "prompt": shortened(one.prompt, _MAX_RECORDED_CHARS)}
                for one in found.tried[:_MAX_PROMPTS_RECORDED]
            ],
            "tasks": {
                "train": len(sets.train), "validation": len(sets.validation), "held_out": len(sets.held_out),
            },
            "search_ended_by": found.ended_by,
            "budget": {
                "rollouts": budget.rollouts,
                "rollouts_begun": budget.started_rollouts,
                "tokens": budget.tokens,
                "agent_tokens": budget.agent_tokens,
                "reflection_tokens": budget.reflection_tokens,
                "reflections": budget.reflections,
                "reflection_cost": budget.cost,
            },
        }  # fmt: skip
