"""`ratchet.evaluate`: models on a task set with a workflow and a judge. Nothing is trained."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from ratchet.api.arguments import AnyJudge, AnyTasks, AnyWorkflow, Arguments, read_arguments, split_of
from ratchet.api.direct_evaluation import evaluate_directly
from ratchet.api.evaluation import Evaluation, evaluation_of
from ratchet.api.event_loop import run_to_end
from ratchet.api.runs import start
from ratchet.tuner.rollouts.runner import final_rollouts
from ratchet.tuner.selection.choice import Selection
from ratchet.tuning.compare_models import ComparisonOptions, compare
from ratchet.tuning.context import open_store, proxy_of


def evaluate(
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
    return run_to_end(evaluate_async(**locals()))


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
    """Do what `evaluate` does, beside the running event loop."""
    given = read_arguments(locals())
    names = (models,) if isinstance(models, str) else tuple(models or ())
    if not names and (base_url is None or _is_proxy(given, base_url)):
        names = (given.settings.model,)
    wanted = ComparisonOptions("eval", names, split_of(tasks, split), limit, score_range, resume)
    wanted.check()
    if base_url is not None and not _is_proxy(given, base_url):
        return await evaluate_directly(given, wanted, base_url=base_url, api_key=api_key)
    return await _evaluate_in_project(given, wanted)


async def _evaluate_in_project(given: Arguments, wanted: ComparisonOptions) -> Evaluation:
    run = await (await start(given, "eval", wanted.resume, partial(compare, given.settings, wanted)))
    selection = msgspec.convert(run.result.details, Selection)
    with open_store(given.settings.store_url, create=False) as store:
        made = final_rollouts(store.rollouts.of_tuning(run.id, responses=True))
        rows = {name: store.tasks.get(name) for name in {one.task_id for one in made}}
    known = {name: row.content for name, row in rows.items() if row is not None}
    return evaluation_of(run.id, selection, made, known)


def _is_proxy(given: Arguments, base_url: str) -> bool:
    """Return whether this is the project's own proxy, where every call is recorded."""
    own = given.settings.tuner_settings().proxy_url or proxy_of(given.settings)
    return base_url.rstrip("/").removesuffix("/v1") == own.rstrip("/").removesuffix("/v1")
