"""Comparisons of models on a task set, where nothing is trained: `evaluate`, `select_model`, and their commands."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from ratchet.api import context
from ratchet.api.arguments import AnyJudge, AnyTasks, AnyWorkflow, Arguments, read_arguments, split_of
from ratchet.api.reports import show_selection
from ratchet.api.run_lease import COMMAND, RunCaller
from ratchet.api.runs import TuningRun, start, synchronous
from ratchet.api.try_out import evaluate_directly
from ratchet.errors import InvalidArgument
from ratchet.output import print_note
from ratchet.settings.project_settings import Settings
from ratchet.store.operation_records import Rollout, Tuning
from ratchet.store.store import open_store
from ratchet.trainer.errors import TuningError
from ratchet.trainer.statistics import CandidateScore, Compared, ScoreRange
from ratchet.tuner.rollouts.runner import final_rollouts
from ratchet.tuner.selection import (
    ModelSelector,
    Request,
    Selection,
    check_prices,
    commonest,
    known_models,
    resolved,
)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt of a model at a task.

    score     the judge's, or the workflow's reward; None: it failed, or could not be judged
    response  what the workflow returned
    failure   the exception of the workflow or the judge
    """

    model: str
    task: Mapping[str, Any]
    attempt: int
    score: float | None
    response: Any
    failure: str | None
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of `ratchet.evaluate`. Printing it, or ending a notebook's cell with it, shows a table.

    run       the run's id; None if the models were called at a base_url, where nothing is stored
    scores    one for each model, best first: candidate, tasks, mean, low and high (95% interval), failed, unjudged
    attempts  each attempt, for a table of your own: `pandas.DataFrame(evaluation.attempts)`
    chosen    the model that is shown to be better than every other; None: no difference is shown
    reason    why
    """

    run: str | None
    scores: tuple[CandidateScore, ...]
    attempts: tuple[Attempt, ...]
    chosen: str | None
    reason: str
    selection: Selection

    def score(self, model: str | None = None) -> CandidateScore:
        """Return the score of a model; None: of the only model. Raises KeyError."""
        found = [one for one in self.scores if model in (None, one.candidate)]
        if len(found) != 1:
            raise KeyError(f"{model}: evaluated were {', '.join(one.candidate for one in self.scores)}")
        return found[0]

    def compared(self, model: str, against: str) -> Compared:
        """Return the mean difference over tasks of two models with its interval, and `verdict`. Raises KeyError."""
        return self.selection.ranking.pair(model, against)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show the table at the end of a notebook's cell."""
        printer.text(str(self))

    def __str__(self) -> str:
        text = io.StringIO()
        show_selection(self.selection, with_choice=len(self.scores) > 1, file=text)
        return text.getvalue()


def evaluation_of(
    run: str | None, selection: Selection, rollouts: Sequence[Rollout], rows: Mapping[str, Mapping[str, Any]]
) -> Evaluation:
    """Return the result. `rows`: the task's row by its id. Raises TuningError if no rollout could be scored."""
    if not selection.measured:
        failure = commonest(one.failure or one.judge_failure for one in rollouts)
        raise TuningError(f"no rollout could be scored: {failure or 'none finished'}")
    attempts = tuple(_attempt(one, rows[one.task_id]) for one in rollouts if one.counts)
    return Evaluation(run, selection.ranking.scores, attempts, selection.chosen, selection.reason, selection)


def _attempt(one: Rollout, row: Mapping[str, Any]) -> Attempt:
    response = None if one.response is None else json.loads(one.response)
    seconds = None if one.started_at is None or one.ended_at is None else one.ended_at - one.started_at
    return Attempt(one.candidate, row, one.attempt, one.score, response, one.failure or one.judge_failure, seconds)


async def evaluate_async(
    workflow: AnyWorkflow | None = None,
    judge: AnyJudge | None = None,
    tasks: AnyTasks | None = None,
    *,
    models: str | Sequence[str] | None = None,
    base_url: str | None = None,
    api_key: str | None = None,
    split: str | None = None,
    limit: int | None = None,
    attempts: int | None = None,
    concurrency: int | None = None,
    score_range: tuple[float, float] | None = None,
    seed: int | None = None,
    test_size: float | None = None,
    agent: str | None = None,
    base_model: str | None = None,
    project: str | None = None,
    config: str | Path | None = None,
    resume: str | None = None,
) -> Evaluation:
    """Run a workflow on tasks with each model, judge it, and compare the models task by task. Also in a notebook.

    `evaluate_async` is for an event loop that runs already.

    workflow     a function, sync or async, `module:function`, or a command line; it runs in an event loop of its own
    judge        a function, `module:function`, or the mapping of a judge's kind; None: the workflow returns a reward
    tasks        `ratchet.Tasks(...)`, a folder, a file or a hub name
    models       a name or several: of the project's `model_list`, versions such as `policy@4`, or what a server at
                 base_url lists; None: the agent's live version, or the only model of the server
    base_url     an OpenAI-compatible server, where nothing is recorded or stored; None: the project's proxy
    api_key      for base_url
    split        None: that of `Tasks`, else `test`
    limit        use only the first N tasks
    attempts     at each task, with each model
    concurrency  rollouts that run at the same time
    score_range  the worst and the best score that the judge can give
    agent        the project's agent, if it has several
    base_model   start the project with this model if it does not run; one that runs with another is refused
    project      the project's name
    config       the project's settings file; None: ratchet.yaml of the current folder
    resume       the id of an evaluation that ended early; with the same workflow and judge

    A workflow, judge or task set that is not given is that of the project's settings.

    Raises RatchetError: TaskSetError, WorkflowError, JudgeError, SettingsError, InvalidArgument; TuningError if no
    rollout could be scored.
    """
    given = read_arguments(locals())
    names = (models,) if isinstance(models, str) else tuple(models or ())
    is_elsewhere = base_url is not None and not _is_proxy(given, base_url)
    if not names and not is_elsewhere:
        names = (given.settings.model,)
    split = split_of(tasks, split)
    wanted = ComparisonOptions("eval", names, split, limit, score_range, resume)
    if base_url is not None and is_elsewhere:
        if resume is not None:
            raise InvalidArgument(
                "resume= needs the project's store, and with base_url= nothing is stored: leave one out"
            )
        made, selection, rows = await evaluate_directly(
            given, names, split, limit, score_range, base_url=base_url, api_key=api_key
        )
        return evaluation_of(None, selection, made, rows)
    run = await (await start(given, "eval", resume, partial(compare, given.settings, wanted)))
    selection = msgspec.convert(run.result.details, Selection)
    with open_store(given.settings.store_url, create=False) as store:
        made = final_rollouts(store.rollouts.of_tuning(run.id, responses=True))
        known = {name: store.tasks.get(name) for name in {one.task_id for one in made}}
    return evaluation_of(
        run.id, selection, made, {name: row.content for name, row in known.items() if row is not None}
    )  # fmt: skip


evaluate = synchronous(evaluate_async)


def _is_proxy(given: Arguments, base_url: str) -> bool:
    """Return whether this is the project's own proxy, where every call is recorded."""
    own = given.settings.tuner.proxy_url or context.proxy_of(given.settings)
    return base_url.rstrip("/").removesuffix("/v1") == own.rstrip("/").removesuffix("/v1")


async def select_model_async(
    workflow: AnyWorkflow | None = None,
    judge: AnyJudge | None = None,
    tasks: AnyTasks | None = None,
    *,
    models: Sequence[str] = (),
    policy: Literal["best", "cheapest"] = "best",
    within: float | None = None,
    split: str | None = None,
    limit: int | None = None,
    attempts: int | None = None,
    concurrency: int | None = None,
    score_range: tuple[float, float] | None = None,
    seed: int | None = None,
    test_size: float | None = None,
    agent: str | None = None,
    base_model: str | None = None,
    project: str | None = None,
    config: str | Path | None = None,
    resume: str | None = None,
) -> TuningRun:
    """Start a comparison of models on the same tasks; the run's `best` is the one to use. Also in a notebook.

    In an event loop that runs already: `await (await select_model_async(...))`.

    models  at least two: of the project's `model_list`, or versions such as `policy@4`; the first is the baseline
    policy  the best, or the cheapest whose score is less than `within` below the best
    resume  the id of a run that ended early; with the same workflow and judge

    The other arguments are those of `evaluate`. Returns once the run has its id. Raises what `evaluate` does.
    """
    given = read_arguments(locals())
    wanted = ComparisonOptions(
        "select-model", tuple(models), split_of(tasks, split), limit, score_range, resume, policy, within
    )
    return await start(given, "select-model", resume, partial(compare, given.settings, wanted))


select_model = synchronous(select_model_async)


@dataclass(frozen=True)
class ComparisonOptions:
    """What is compared, besides the settings of all runs with rollouts. Raises InvalidArgument."""

    kind: Literal["select-model", "eval"]
    candidates: Sequence[str]  # eval: none, or the model and the one that it is compared with first
    split: str
    limit: int | None
    score_range: tuple[float, float] | None
    resume: str | None  # id of the run to resume
    policy: Literal["best", "cheapest"] = "best"
    within: float | None = None
    may_be_one: bool = False  # the first candidate is a default: left out if the second one is the same version

    def __post_init__(self) -> None:
        if self.kind == "select-model" and self.resume is None and len(self.candidates) < 2:
            raise InvalidArgument("name at least two candidates: --candidate NAME --candidate NAME (in Python models=)")
        if (self.policy == "cheapest") != (self.within is not None):
            raise InvalidArgument("--policy cheapest needs --within X, and the other way round")
        if self.score_range and self.score_range[0] >= self.score_range[1]:
            raise InvalidArgument("--score-range LOW HIGH: LOW must be below HIGH")


def compare(settings: Settings, given: ComparisonOptions, caller: RunCaller = COMMAND) -> tuple[Request, Selection]:
    """Run or resume a comparison, with services for it if none run; return its request and its result.

    Raises TuningError, InvalidArgument, and the errors of `context.opened` and `run_services`.
    """
    models, resume = given.candidates, given.resume
    if resume is not None:
        models = context.stored_run(settings, resume, given.kind).config["candidates"]
        if given.kind == "select-model" and given.candidates and set(given.candidates) != set(models):
            raise InvalidArgument(
                f"--resume {resume} uses the candidates of that run, {', '.join(models)}: leave --candidate (in Python "
                "models=) out"
            )
        settings = context.with_run_settings(settings, resume)

    def check_usable() -> None:
        if resume is None:
            context.check_usable(settings, caller, given.split)

    with context.run_services(settings, caller, models, check_usable), context.opened(settings, caller) as opened:
        request, run = _start(opened, given) if resume is None else _resume(opened, resume)
        with opened.lease.acquire(run.id, resume=resume is not None) as run:
            tasks = list(context.task_set_of(settings, request.tasks).rows(request.split, request.limit))
            rollouts = len(tasks) * request.attempts * len(request.candidates)
            print_note(f"{run.id}: {rollouts} rollouts, {len(tasks)} tasks for each of {', '.join(request.candidates)}")
            return request, asyncio.run(ModelSelector(opened).run(request, tasks, run))


def _start(opened: context.TuningContext, given: ComparisonOptions) -> tuple[Request, Tuning]:
    """Check the options and start a run. Raises InvalidArgument, TuningError."""
    settings, store = opened.settings, opened.store
    source, named = context.source_of(settings), given.candidates
    known = known_models(opened.proxy_url, opened.api_key)
    if given.may_be_one and len({resolved(store, [name], known) for name in named}) == 1:
        named = named[-1:]
    candidates = resolved(store, named, known)
    check_prices(candidates, opened.prices, given.policy)
    next(iter(context.task_set_of(settings, source).rows(given.split, 1)), None)  # fail before the run starts
    request = Request(
        kind=given.kind, alias=settings.model, candidates=candidates, tasks=source, split=given.split,
        limit=given.limit, workflow=opened.workflow, judge=opened.scorer.name,
        judge_given=settings.given_in("trainer").get("judge"), attempts=opened.tuner.attempts, seed=opened.tuner.seed,
        policy=given.policy, within=given.within, failure_score=opened.tuner.failure_score,
        score_range=ScoreRange(*given.score_range) if given.score_range else None,
    )  # fmt: skip
    return request, store.tunings.begin(request.kind, request.alias, msgspec.to_builtins(request))


def _resume(opened: context.TuningContext, name: str) -> tuple[Request, Tuning]:
    """Return the request of a stopped run, and the run. Raises InvalidArgument if workflow or judge are others."""
    run = opened.store.tunings.get(name)
    request = msgspec.convert(run.config, Request)
    used = {"workflow": (request.workflow, opened.workflow), "judge": (request.judge, opened.scorer.name)}
    context.check_same(run, used, "comparison")
    return request, run


def plain(selection: Selection) -> dict[str, Any]:
    """Return a selection as JSON values, with the verdict of every pair."""
    content: dict[str, Any] = msgspec.to_builtins(selection)
    for pair, values in zip(selection.ranking.pairs, content["ranking"]["pairs"], strict=True):
        values["verdict"] = str(pair.verdict)
    return content
