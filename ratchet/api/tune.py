"""`ratchet.tune` and `ratchet tune weights`: reinforcement learning on a task set, in the running project or in
services started for it; the result is the version that is best on tasks held out.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import ValidationError

from ratchet.api import arguments, context
from ratchet.api.arguments import (
    AnyJudge,
    AnyTasks,
    AnyWorkflow,
    Family,
    Function,
    read_arguments,
    read_families,
)
from ratchet.api.judge_server import JudgeServer
from ratchet.api.run_lease import COMMAND, RunCaller
from ratchet.api.runs import TuningRun, start, synchronous
from ratchet.errors import InvalidArgument
from ratchet.output import print_note
from ratchet.settings import load_settings
from ratchet.settings.project_settings import Settings
from ratchet.store.operation_records import Tuning
from ratchet.supervisor.up import attach_or_start, read_run_state
from ratchet.trainer.judges.kinds.function import FunctionJudge
from ratchet.trainer.observability.progress import print_line
from ratchet.trainer.settings.trainer_settings import TrainerSettings
from ratchet.trainer.tasks import TEST, TRAIN
from ratchet.tuner.reports import TuningResult
from ratchet.tuner.reports import plain as plain_result
from ratchet.tuner.rollouts.workflow import load_workflow
from ratchet.tuner.tasks import parse_families
from ratchet.tuner.weights.weight_tuning import WeightsPlan, WeightsTuning, config_of, plan_of

SETTINGS: Final = {**arguments.SETTINGS, "attempts": "trainer.num_generations"}
_RUN_JUDGE = "run_judge"  # the judge that a run brings, in its options and its request
_JUDGE = "judge"  # place of the only function


async def tune_async(
    workflow: AnyWorkflow | None = None,
    judge: AnyJudge | None = None,
    tasks: AnyTasks | None = None,
    *,
    families: Mapping[str, Family] | None = None,
    base_model: str | None = None,
    rounds: int | None = None,
    tasks_per_round: int | None = None,
    eval_every: int | None = None,
    eval_tasks: int | None = None,
    validation_tasks: int | None = None,
    eval_attempts: int | None = None,
    eval_workflow: str | None = None,
    patience: int | None = None,
    collect: int | None = None,
    warm_start: Sequence[str] = (),
    warm_start_settings: Mapping[str, Any] | None = None,
    attempts: int | None = None,
    concurrency: int | None = None,
    seed: int | None = None,
    test_size: float | None = None,
    settings: Mapping[str, Any] | None = None,
    agent: str | None = None,
    project: str | None = None,
    config: str | Path | None = None,
    resume: str | None = None,
) -> TuningRun:
    """Start the training of the weights on a task set; the run's `best` is the version. Also in a notebook.

    It uses the running project. If none runs, vLLM, proxy and trainer are started for the run and stopped at its end.
    In an event loop that runs already: `await (await tune_async(...))`.

    judge                a function that the trainer can import is used by its name. Any other, such as one of a
                         notebook, is called in this process, only for this run's rollouts; if the process ends,
                         trajectories wait for `resume=` (at most `tuner.judge_away_seconds`)
    families             several task sets by name, each with its workflow and judge, in place of workflow, judge and
                         tasks: {"mail": ratchet.Family(tasks, workflow, judge, weight=3), "math": ...}
    base_model           a folder or a hub name; None: that of the settings. A project that runs with another is refused
    rounds               of training tasks; None: 20
    tasks_per_round      None: 16
    eval_every           rounds between two evaluations on validation tasks; None: 5
    eval_tasks           maximum number of test tasks; None: all
    validation_tasks     their maximum number; None: 32
    eval_attempts        at each validation and test task; None: 1
    eval_workflow        the agent of the evaluations, `module:function`, such as a greedy one
    patience             stop after this many evaluations without a gain; None: 3
    collect              rounds of rollouts for a warm start, not trained
    warm_start           run SFT first on: policy, demonstrations, or a name of `model_list`
    warm_start_settings  such as {"general": "chat.jsonl"}
    attempts             at each task: the group size
    settings             of this run, in the form of ratchet.yaml, such as {"vllm": {"max_model_len": 4096}}; they
                         override the file, for services that are started for this run
    resume               the id of a run that ended early; with the same workflow and judge

    The other arguments are those of `evaluate`; the task set has a split `test`, or `test_size` is set. Returns once
    the run has its id. Raises what `evaluate` does, and CliError if the services cannot be started.
    """
    own = locals() | {
        "warm_start": tuple(warm_start),
        "warm_start_setting": [f"{key}={json.dumps(value)}" for key, value in (warm_start_settings or {}).items()],
    }
    own |= {"families": (), "family_workflow": ()}
    parts = None
    if families is not None:
        if twice := [name for name in ("workflow", "judge", "tasks") if own[name] is not None]:
            raise InvalidArgument(f"families= has workflow, judge and tasks of each family: leave {twice[0]}= out")
        parts = read_families(families)
        own["workflow"] = next(iter(families.values())).workflow  # every family has its own
        if resume is None:
            own |= {"families": parts.sources, "family_workflow": parts.workflow_names}
    given = read_arguments(own, SETTINGS)
    running = bool(read_run_state(given.settings.state))
    fixed = [name for name in settings or {} if name not in ("tuner", "project", "state_dir")]
    if fixed and running:
        raise InvalidArgument(
            f"project {given.settings.project} runs with its own settings: leave {fixed[0]} out of settings=, or stop "
            "the project so that services are started for this run"
        )
    functions: Mapping[str, Function | str] = {} if given.judge is None else {_JUDGE: given.judge}
    if parts is not None:
        functions = parts.functions(importable=running)

    def work(caller: RunCaller) -> None:
        with ExitStack() as stack:
            used = given.settings
            served = _serve(stack, used, functions, resume)
            if parts is not None:
                caller = replace(caller, families=parts.workflows)
            judge = served.get(_JUDGE) if parts is None else parts.judge(served)
            if judge is not None:
                used = used.changed(trainer={"judge": judge})
                own[_RUN_JUDGE] = judge if served or running else None
            tune_weights(used, own, caller)

    return await start(given, "weights", resume, work)


tune = synchronous(tune_async)


def _serve(
    stack: ExitStack, settings: Settings, functions: Mapping[str, Function | str], resume: str | None
) -> dict[str, Any]:
    """Serve functions until `stack` ends, of a resumed run at its old place; return their specifications by name."""
    if not functions:
        return {}
    stored = _served(context.stored_run(settings, resume).config.get(_RUN_JUDGE)) if resume else []
    address = Path(stored[0]["address"]).name if stored else f"{secrets.token_hex(8)}.json"
    judges = {name: FunctionJudge(function) for name, function in functions.items()}
    away = settings.tuner.judge_away_seconds
    server = stack.enter_context(JudgeServer(judges, settings.state.judges.resolve() / address, away))
    return {name: server.spec(name) for name in functions}


def _served(judge: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Return the functions of a calling process in a run's judge."""
    parts = [] if judge is None else judge["judges"].values() if judge["kind"] == "by_family" else [judge]
    return [one for one in parts if one["kind"] == "caller"]


def tune_weights(
    settings: Settings,
    own: Mapping[str, Any],
    caller: RunCaller = COMMAND,
    announce: Callable[[str], None] = print_note,
) -> TuningResult:
    """Run to completion, in the running project or in services for it.

    own  the options that are not settings: those of WeightsPlan, families (`[NAME=]SOURCE[:WEIGHT]`), family_workflow
         (`NAME=SPEC`), warm_start, warm_start_setting (`KEY=VALUE`), resume and run_judge

    Raises TuningError, InvalidArgument, CliError.
    """
    resume: str | None = own["resume"]
    settings = _checked(settings, own, caller)
    with (
        attach_or_start(settings, announce, caller.stop) as services,
        context.opened(settings, caller) as opened,
    ):
        if resume is None:
            plan = _plan(settings, own, opened.workflow, caller)
            name = opened.store.tunings.begin("weights", settings.model, config_of(plan)).id
        else:
            plan_of(opened.store.tunings.get(resume))  # raises TuningError if the run is of another method
            name = resume
        with opened.lease.acquire(name, resume=resume is not None) as run:
            print_note(f"{run.id} on {services.base_url}")
            return _run(opened, run, services.check, caller)


def _run(opened: context.TuningContext, run: Tuning, check: Callable[[], None], caller: RunCaller) -> TuningResult:
    plan, settings = plan_of(run), opened.settings
    families = parse_families(plan.families, partial(context.task_set_of, settings))
    by_family = {name: load_workflow(caller.families.get(name, one)) for name, one in plan.family_workflows.items()}
    runner = evaluator = replace(opened.runner, families=by_family)
    if plan.eval_workflow is not None:
        evaluator = replace(runner, workflow=load_workflow(plan.eval_workflow))

    def watch() -> None:
        check()
        opened.lease.check()

    made = WeightsTuning(
        replace(opened, runner=runner), run, families, settings.trainer, evaluator=evaluator,
        failure_score=opened.tuner.failure_score, watch=watch, report=print_line,
    )  # fmt: skip
    result = asyncio.run(made.run())
    opened.store.tunings.end(run.id, "done", plain_result(result))
    return result


def _plan(settings: Settings, own: Mapping[str, Any], workflow: str | None, caller: RunCaller) -> WeightsPlan:
    """Return the plan. Raises InvalidArgument, which names the wrong option."""
    tuner, trainer = settings.tuner, settings.trainer
    values = {name: own[name] for name in WeightsPlan.model_fields if own.get(name) is not None}
    named = _pairs("--family-workflow", own["family_workflow"], "math=my_agent:run")
    try:
        return WeightsPlan.model_validate(
            values | {
                "families": own["families"] or ((tuner.tasks,) if tuner.tasks else ()), "workflow": workflow,
                "family_workflows": named | {name: load_workflow(one).name for name, one in caller.families.items()},
                "attempts": trainer.num_generations, "seed": tuner.seed, "warm_start": _warm_start(own),
            }
        )  # fmt: skip
    except ValidationError as wrong:
        first = wrong.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidArgument(f"{where}: {first['msg'].removeprefix('Value error, ')}") from wrong


def _warm_start(own: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the settings of the warm start; None without --warm-start."""
    if not own["warm_start"]:
        return None
    pairs = _pairs("--warm-start-setting", own["warm_start_setting"], "num_train_epochs=3")
    settings = {key.replace("-", "_"): yaml.safe_load(value) for key, value in pairs.items()}
    return settings | {"sources": own["warm_start"]}


def _pairs(option: str, given: Sequence[str], example: str) -> dict[str, str]:
    """Return the values of a repeated option by key. Raises InvalidArgument."""
    if broken := [text for text in given if not all(text.partition("="))]:
        raise InvalidArgument(f"{option} {broken[0]}: write KEY=VALUE, such as {example}")
    return {key.strip(): value for key, _, value in (text.partition("=") for text in given)}


def _checked(settings: Settings, own: Mapping[str, Any], caller: RunCaller) -> Settings:
    """Check everything before services are started; return the settings, completed by those of a resumed run.

    Raises TuningError, InvalidArgument, CliError, TaskSetError, WorkflowError.
    """
    resume, judge = own["resume"], own.get(_RUN_JUDGE)
    running = read_run_state(settings.state)
    if resume is not None:
        if own["families"] or own["warm_start"] or own["family_workflow"]:
            raise InvalidArgument(
                "--resume uses the tasks, the warm start and the families' workflows of that run: leave these options "
                "out"
            )
        _check_run_judge(settings, resume, judge, running=bool(running))
    if not settings.has_judge:
        raise InvalidArgument("no judge is set: give --judge (in Python judge=), or set trainer.judge in ratchet.yaml")
    if settings.base_model is None:
        raise InvalidArgument(
            "no base model is set: give --base-model (in Python base_model=), or set base_model in ratchet.yaml"
        )
    settings = context.with_run_settings(settings, resume)
    if resume is None:
        if own["warm_start_setting"] and not own["warm_start"]:
            raise InvalidArgument("--warm-start-setting needs --warm-start policy, demonstrations or a model's name")
        if not own["families"]:
            context.source_of(settings)  # raises InvalidArgument
        _check_readable(settings, own, caller)
    if running:
        _check_running_trainer(settings, running, has_judge=judge is not None)
    return settings


def _check_run_judge(settings: Settings, run: str, given: Mapping[str, Any] | None, *, running: bool) -> None:
    """Raise InvalidArgument unless the run is resumed with the judge functions that it began with."""
    stored = context.stored_run(settings, run).config.get(_RUN_JUDGE)
    wanted, now = ([one["function"] for one in _served(judge)] for judge in (stored, given))
    if wanted and wanted != now:
        raise InvalidArgument(
            f"run {run} is judged by {', '.join(wanted)} of the process that began it: resume it in Python with the "
            f"same judge, ratchet.tune(workflow, judge, ..., resume={run!r})"
        )
    if stored is None and given is not None and running:
        raise InvalidArgument(f"run {run} is judged by the running trainer: leave the judge out to resume it")


def _check_readable(settings: Settings, own: Mapping[str, Any], caller: RunCaller) -> None:
    """Read the task sets and load the workflows. Raises TaskSetError, WorkflowError."""
    given = caller.workflow or settings.tuner.workflow
    plan = _plan(settings, own, None if given is None else load_workflow(given).name, caller)
    families = parse_families(plan.families, partial(context.task_set_of, settings))
    for family in families:
        family.tasks.check(TRAIN)
        family.tasks.check(TEST)
    names = [family.name for family in families]
    if unknown := sorted(plan.family_workflows.keys() - set(names)):
        raise InvalidArgument(
            f"--family-workflow {unknown[0]}: the task sets are {', '.join(names)} (--tasks NAME=SOURCE)"
        )
    named = (one for name, one in plan.family_workflows.items() if name not in caller.families)
    for workflow in filter(None, (plan.eval_workflow, *named)):
        load_workflow(workflow)


def _check_running_trainer(settings: Settings, running: Mapping[str, Any], *, has_judge: bool) -> None:
    """Raise InvalidArgument if no trainer runs, if it expects another group size, or uses another judge.

    `has_judge`: the run brings its own judge.
    """
    run = load_settings.read_last_run(settings)
    shared, own = run.get("trainer") or {}, (run.get("agents") or {}).get(settings.model) or {}
    judge = own.get("judge") or shared.get("judge")
    if "trainer" not in running.get("services", {}):
        raise InvalidArgument(
            f"project {settings.project} runs without a trainer: set trainer.judge in ratchet.yaml and restart it, or "
            "stop it so that services are started for this run"
        )
    if not has_judge and judge and settings.changed(trainer={"judge": judge}).trainer.judge != settings.trainer.judge:
        raise InvalidArgument(
            f"--judge {settings.given_in('trainer')['judge']}: the running trainer uses {judge}: leave the judge out, "
            "or stop the project so that services are started for this run"
        )
    expected = shared.get("num_generations", TrainerSettings.model_fields["num_generations"].default)
    wanted = settings.trainer.num_generations
    if wanted != expected:
        raise InvalidArgument(
            f"--attempts {wanted}: the running trainer uses {expected} rollouts per task (trainer.num_generations): "
            f"give --attempts {expected}, or stop the project so that services are started for this run"
        )
