"""A prompt tuning from settings: splits the tasks, runs rollouts through the proxy, records the run in the store.

`tunings.config` holds the request without keys, so that the id is enough to resume the run. While it runs,
`tunings.result` holds the answers of the reflection model and the judge's explanations.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from msgspec.structs import replace

from ratchet.store.operation_records import Rollout, Tuning
from ratchet.store.records import JudgeRequest, Verdict
from ratchet.store.store import Store
from ratchet.trainer.controller.judges.language_model import LanguageModel
from ratchet.trainer.controller.judges.truncation import shortened
from ratchet.trainer.errors import SettingError
from ratchet.trainer.observability.progress import Progress
from ratchet.trainer.tasks import TEST, TRAIN, Task, TaskSet
from ratchet.tuner.prompts.budget import Budget
from ratchet.tuner.prompts.optimizer import load_optimizer
from ratchet.tuner.prompts.prompt_tuning import Found, PromptPlan, PromptTuning, details
from ratchet.tuner.prompts.reflection_model import Answered, ReflectionModel
from ratchet.tuner.prompts.seed_prompt import SeedPrompt, given, serving
from ratchet.tuner.prompts.task_splits import Sets, Sizes, divide
from ratchet.tuner.prompts.trials import MAX_FEEDBACK_CHARS, SEED, Trials
from ratchet.tuner.reports.tuning_result import TuningResult, plain, task_set
from ratchet.tuner.rollouts.prices import Money, Prices, RolloutCost
from ratchet.tuner.rollouts.runner import RolloutJob, RolloutRunner
from ratchet.tuner.rollouts.scoring import RolloutScorer
from ratchet.tuner.selection.choice import figures_of
from ratchet.tuner.selection.model_selection import busy_seconds
from ratchet.tuner.settings import SEARCH_ROLLOUTS, TunerSettings
from ratchet.tuner.tasks.task_mix import VALIDATION

PROMPT_TUNING = "prompt tuning"  # name of the progress bar: rollouts of the budget
_MAX_ROWS = 20_000  # read from a split


@dataclass(frozen=True, slots=True)
class PromptRunContext:
    """Components of a run besides its settings. `runner` must not retry: the budget counts every rollout."""

    store: Store
    tasks: TaskSet
    runner: RolloutRunner
    scorer: RolloutScorer
    reflection_key: str | None
    prices: Prices
    progress: Progress
    report: Callable[[str], None]


def check(settings: TunerSettings, tasks: TaskSet) -> None:
    """Check a request before it becomes a run.

    Raises SettingError if a setting is missing, TuningError if the optimizer cannot be loaded if
    the tasks need more rollouts, and TaskSetError if they cannot be read or are too few.
    """
    if settings.reflection is None:
        raise SettingError(
            "no reflection model is set: give --reflection-url and --reflection-model, or set tuner.reflection"
        )
    load_optimizer(settings.prompt.method)
    plan = _plan_of(settings, _divided(settings, tasks)[0])
    if settings.prompt.max_rollouts is not None:
        plan.check_budget(settings.prompt.max_rollouts)


def config_of(settings: TunerSettings, judge: Any, seed_prompt: str | None) -> dict[str, Any]:
    """Return the request of a run for `tunings.config`."""
    return {"tuner": settings.model_dump(mode="json"), "judge": judge, "seed_prompt": seed_prompt}


def run(tuning: Tuning, context: PromptRunContext) -> TuningResult:
    """Run or resume a tuning and store the result. Raises TuningError, StoreError."""
    result = _PromptRun(tuning, context).run()
    context.store.tunings.end(tuning.id, "done", plain(result))
    return result


class _PromptRun:
    """A run in this process."""

    def __init__(self, tuning: Tuning, context: PromptRunContext) -> None:
        self._tuning = tuning
        self._context = context
        self._settings = TunerSettings.model_validate(tuning.config["tuner"])
        self._plan = self._planned()
        progress = tuning.result or {}
        self._answered: list[Answered] = list(progress.get("answered", ()))
        self._explanations: dict[str, str] = dict(progress.get("explanations", {}))
        prompt = self._settings.prompt
        rollouts = prompt.max_rollouts or SEARCH_ROLLOUTS + self._plan.held_out_rollouts
        self._budget = Budget(rollouts, prompt.max_total_tokens, concurrency=self._settings.concurrency)
        self._work = context.progress.begin(PROMPT_TUNING, rollouts)

    def run(self) -> TuningResult:
        """Search, compare, and return the record."""
        context, settings = self._context, self._settings
        with asyncio.Runner() as loop:  # one event loop for all rollouts, because the agent's clients belong to it

            def run_jobs(jobs: Sequence[RolloutJob]) -> list[Rollout]:
                made = loop.run(context.runner.run(jobs, self._tuning.id, self._ended))
                scored = self._scored(made)
                for one in scored:
                    if one.score is not None:
                        self._work.note(score=one.score)
                return scored

            context.scorer.count_abandoned_tokens(self._tuning.id)
            trials = Trials(
                context.store, self._tuning.id, self._tasks, run_jobs, self._scored, self._budget,
                max_prompt_chars=settings.prompt.max_prompt_chars, failure_score=settings.failure_score,
                model=self._model(), explanations=self._explanations,
            )  # fmt: skip
            self._work.at(self._budget.started_rollouts, self._budget.rollouts)
            tuned = PromptTuning(
                context.store, trials, self._budget, load_optimizer(settings.prompt.method), self._reflection,
                self._plan, context.report,
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

        scored = self._context.scorer.score(rollouts, keep_explanation)
        if len(self._explanations) > before:
            self._write_progress()
        return scored

    def _ended(self, rollout: Rollout) -> None:
        self._work.add()

    def _planned(self) -> PromptPlan:
        file = self._tuning.config.get("seed_prompt")
        sets, self._tasks = _divided(self._settings, self._context.tasks)
        plan = _plan_of(self._settings, sets)
        seed = serving(self._context.store, self._tuning.alias, plan.mode) if file is None else given(str(file))
        return dataclasses.replace(plan, seed_prompt=seed)

    def _model(self) -> str | None:
        """Return the live version by name, so that no version in its ramp serves a part of the rollouts.

        A model of `model_list` has no versions: it serves under its own name.
        """
        live = self._context.store.policies.live().get(self._tuning.alias)
        return self._tuning.config.get("listed_model") if live is None else f"{live.alias}@{live.version}"

    def _reflection(self, seed: SeedPrompt) -> ReflectionModel:
        spec = self._settings.reflection
        assert spec is not None  # checked by `check`
        return ReflectionModel(
            LanguageModel(spec, self._context.reflection_key),
            self._budget,
            mode=seed.mode,
            max_prompt_chars=self._settings.prompt.max_prompt_chars,
            answered=tuple(self._answered),
            keep=self._keep,
        )

    def _keep(self, answered: Answered, judge_requests: Sequence[JudgeRequest]) -> None:
        self._answered.append(answered)
        self._write_progress()
        self._context.store.groups.record_judge_requests(judge_requests)

    def _write_progress(self) -> None:
        self._context.store.tunings.update(
            self._tuning.id, {"answered": self._answered, "explanations": self._explanations}
        )

    def _record(self, found: Found, trials: Trials) -> TuningResult:
        method = self._settings.prompt.method
        spec = self._settings.reflection
        assert spec is not None
        about = {"method": method, "reflection": {"model": spec.model, "base_url": spec.base_url}}
        better = found.verdict == "better"
        return TuningResult(
            method="prompt",
            technique=f"{method.upper()}, {len(found.tried)} prompts",
            alias=self._tuning.alias,
            task_set=task_set(str(self._settings.tasks), TEST, self._plan.sets.held_out),
            judge=self._context.scorer.name,
            workflow=str(self._settings.workflow),
            attempts=self._settings.attempts,
            baseline="the agent's own prompt" if found.baseline == SEED else found.baseline,
            best=found.best if better else None,
            gain=found.gain,
            spent=self._spent(trials),
            wall_seconds=busy_seconds(trials.rollouts) + sum(float(one["seconds"]) for one in self._answered),
            notes=(found.seed.note, f"reflection by {spec.model}", found.why),
            details=details(found, self._plan, self._budget, about),
        )

    def _spent(self, trials: Trials) -> RolloutCost:
        """Return the cost of the agent and the reflections."""
        served = [replace(one, model=one.model or self._tuning.alias) for one in trials.rollouts]
        agent = figures_of("", served, self._context.prices).spent
        tokens = self._budget.reflection_tokens
        money = Money(self._budget.cost or 0.0, known=self._budget.cost is not None)
        return agent + RolloutCost(prompt_tokens=tokens, money=money)


def _plan_of(settings: TunerSettings, sets: Sets) -> PromptPlan:
    """Return the plan of the settings, without a seed prompt."""
    prompt = settings.prompt
    return PromptPlan(
        sets=sets,
        attempts=settings.attempts,
        seed=settings.seed,
        max_prompt_chars=prompt.max_prompt_chars,
        mode=None if prompt.mode == "auto" else prompt.mode,
        failure_score=settings.failure_score,
    )


def _divided(settings: TunerSettings, tasks: TaskSet) -> tuple[Sets, dict[str, Task]]:
    """Return the training, validation and held-out tasks of a set, and their rows by id. Raises TaskSetError."""
    prompt, splits, rows = settings.prompt, tasks.splits(), dict[str, Task]()

    def read(split: str, limit: int | None = _MAX_ROWS) -> list[Task]:
        found = list(islice(tasks.rows(split), limit))
        rows.update({task.id: task for task in found})
        return found

    train = TRAIN if TRAIN in splits else splits[0]
    checked = next((split for split in splits if split in VALIDATION and split != train), None)
    test = read(TEST, prompt.held_out_tasks) if TEST in splits and train != TEST else []
    checking = read(checked) if checked else []
    sizes = Sizes(prompt.train_tasks, prompt.validation_tasks, prompt.held_out_tasks)
    sets = divide(read(train), test, sizes, settings.seed, checking)
    used = {*sets.train, *sets.validation, *sets.held_out}
    return sets, {task: row for task, row in rows.items() if task in used}
