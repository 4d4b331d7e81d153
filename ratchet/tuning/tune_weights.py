"""Start or resume weight tuning, in the running project or in services started for it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratchet.errors import InvalidArgument
from ratchet.output import print_note
from ratchet.settings import load_settings
from ratchet.supervisor.up import read_run_state
from ratchet.tuning import context as tuning
from ratchet.tuning.caller import COMMAND, RunCaller

if TYPE_CHECKING:
    from ratchet.settings.project_settings import Settings
    from ratchet.store.operation_records import Tuning
    from ratchet.store.store import Store
    from ratchet.supervisor.up import ProjectServices
    from ratchet.tuner.reports.tuning_result import TuningResult
    from ratchet.tuner.weights.weights_plan import WeightsPlan
    from ratchet.tuning.context import TuningContext

RUN_JUDGE = "run_judge"  # the judge that a run brings, in its options and its request
_TUNER = ("tasks", "workflow", "concurrency", "seed", "test_size")
_PLANNED = (
    "rounds", "tasks_per_round", "eval_every", "eval_tasks", "validation_tasks", "eval_attempts", "eval_workflow",
    "patience", "collect",
)  # fmt: skip


def setting_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options or arguments by the names of their settings."""
    names = {name: f"tuner.{name}" for name in _TUNER}
    names |= {"judge": "trainer.judge", "attempts": "trainer.num_generations"}
    return {names.get(name, name): value for name, value in given.items()}


def prepare(settings: Settings, own: Mapping[str, Any], caller: RunCaller = COMMAND) -> Settings:
    """Check everything before services are started; return the settings, completed by those of a resumed run.

    `own`: the options that are not settings. Raises TuningError, InvalidArgument, CliError.
    """
    if own["resume"] is not None and (own["families"] or own["warm_start"] or own["family_workflow"]):
        raise InvalidArgument(
            "--resume uses the tasks, the warm start and the families' workflows of that run: leave these options out"
        )
    if own["resume"] is not None:
        _check_run_judge(settings, own["resume"], own.get(RUN_JUDGE))
    if not settings.has_judge:
        raise InvalidArgument("no judge is set: give --judge (in Python judge=), or set trainer.judge in ratchet.yaml")
    if settings.base_model is None:
        raise InvalidArgument(
            "no base model is set: give --base-model (in Python base_model=), or set base_model in ratchet.yaml"
        )
    settings = tuning.with_run_settings(settings, own["resume"])
    _check(settings, own, caller)
    if read_run_state(settings.state):
        _check_running_trainer(settings, has_judge=own.get(RUN_JUDGE) is not None)
    return settings


def judge_address(settings: Settings, run: str) -> str | None:
    """Return the name of the file with the address of a run's judge functions; None if it has none."""
    files = [Path(one["address"]).name for one in _served(tuning.stored_run(settings, run).config.get(RUN_JUDGE))]
    return files[0] if files else None


def _served(judge: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Return the functions of a calling process in a run's judge."""
    parts = [] if judge is None else judge["judges"].values() if judge["kind"] == "by_family" else [judge]
    return [one for one in parts if one["kind"] == "caller"]


def _check_run_judge(settings: Settings, run: str, given: Mapping[str, Any] | None) -> None:
    """Raise InvalidArgument unless the run is resumed with the judge functions that it began with."""
    stored = tuning.stored_run(settings, run).config.get(RUN_JUDGE)
    wanted, now = ([one["function"] for one in _served(judge)] for judge in (stored, given))
    if wanted and wanted != now:
        raise InvalidArgument(
            f"run {run} is judged by {', '.join(wanted)} of the process that began it: resume it in Python with the "
            f"same judge, ratchet.tune(workflow, judge, ..., resume={run!r})"
        )
    if stored is None and given is not None and read_run_state(settings.state):
        raise InvalidArgument(f"run {run} is judged by the running trainer: leave the judge out to resume it")


def tune(
    settings: Settings, own: Mapping[str, Any], services: ProjectServices, caller: RunCaller = COMMAND
) -> TuningResult:
    """Run to completion, with what `prepare` returned. Raises TuningError, CliError."""
    with tuning.opened(settings, caller) as tuner_context:
        name = _check_kind(tuner_context.store, own["resume"]) if own["resume"] else _start(tuner_context, own, caller)
        with tuner_context.lease.acquire(name, resume=own["resume"] is not None) as run:
            print_note(f"{run.id} on {services.base_url}")
            return _run(tuner_context, run, services.check, caller)


def _run(tuner_context: TuningContext, run: Tuning, check: Any, caller: RunCaller) -> TuningResult:
    from ratchet.trainer.observability.progress import print_line
    from ratchet.tuner.reports.tuning_result import plain
    from ratchet.tuner.rollouts.runner import RolloutRunner
    from ratchet.tuner.rollouts.workflow import load_workflow
    from ratchet.tuner.tasks.task_mix import parse_families
    from ratchet.tuner.weights.weight_tuning import WeightsTuning
    from ratchet.tuner.weights.weights_plan import plan_of
    from ratchet.tuner.weights.weights_result import result_of

    plan, settings = plan_of(run), tuner_context.settings
    trainer = settings.trainer_settings(base_model=settings.base_model)
    evaluator = None
    if plan.eval_workflow is not None:
        evaluator = RolloutRunner(
            tuner_context.store, tuner_context.proxy_url, tuner_context.api_key, load_workflow(plan.eval_workflow),
            tuner_context.tuner, alias=settings.model, progress=tuner_context.progress, check=tuner_context.lease.check,
            keep_stdout=not caller.in_python,
        )  # fmt: skip
    families = parse_families(plan.families, tuner_context.task_set)
    by_family = {name: load_workflow(caller.families.get(name, one)) for name, one in plan.family_workflows.items()}
    runner = tuner_context.runner.with_families(by_family)

    def watch() -> None:
        check()
        tuner_context.lease.check()

    made = WeightsTuning(
        tuner_context.store, run, families, trainer, runner, tuner_context.scorer,
        evaluator=(evaluator or tuner_context.runner).with_families(by_family),
        progress=tuner_context.progress, failure_score=tuner_context.tuner.failure_score, watch=watch,
        report=print_line,
    )  # fmt: skip
    asyncio.run(made.run())
    result = result_of(tuner_context.store, run, made, trainer, tuner_context.scorer.name, tuner_context.prices)
    tuner_context.store.tunings.end(run.id, "done", plain(result))
    return result


def _start(tuner_context: TuningContext, own: Mapping[str, Any], caller: RunCaller) -> str:
    from ratchet.tuner.weights.weights_plan import config_of

    plan = _plan(tuner_context.settings, own, tuner_context.workflow, caller)
    return tuner_context.store.tunings.begin("weights", tuner_context.settings.model, config_of(plan)).id


def _check_kind(store: Store, name: str) -> str:
    """Return the id. Raises TuningError if the run is of another method."""
    from ratchet.tuner.weights.weights_plan import plan_of

    plan_of(store.tunings.get(name))
    return name


def _plan(settings: Settings, own: Mapping[str, Any], workflow: str | None, caller: RunCaller) -> WeightsPlan:
    """Return the plan. Raises InvalidArgument, which names the wrong option."""
    from pydantic import ValidationError

    from ratchet.tuner.rollouts.workflow import load_workflow
    from ratchet.tuner.weights.weights_plan import WeightsPlan

    tuner, trainer = settings.tuner_settings(), settings.trainer_settings(base_model=settings.base_model)
    families = own["families"] or ((tuner.tasks,) if tuner.tasks else ())
    given = {name: own[name] for name in _PLANNED if own[name] is not None}
    named = _pairs("--family-workflow", own["family_workflow"], "math=my_agent:run")
    given["family_workflows"] = named | {name: load_workflow(one).name for name, one in caller.families.items()}
    values = given | {"families": families, "workflow": workflow, "attempts": trainer.num_generations}
    values[RUN_JUDGE] = own.get(RUN_JUDGE)
    try:
        return WeightsPlan(**values, seed=tuner.seed, warm_start=_warm_start(own))
    except ValidationError as wrong:
        first = wrong.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidArgument(f"{where}: {first['msg'].removeprefix('Value error, ')}") from wrong


def _warm_start(own: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the settings of the warm start; None without --warm-start."""
    import yaml

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


def _check(settings: Settings, own: Mapping[str, Any], caller: RunCaller) -> None:
    """Check the options before services are started. Raises InvalidArgument, TuningError."""
    if own["resume"] is not None:
        return
    if own["warm_start_setting"] and not own["warm_start"]:
        raise InvalidArgument("--warm-start-setting needs --warm-start policy, demonstrations or a model's name")
    if not own["families"] and settings.tuner_settings().tasks is None:
        raise InvalidArgument("no task set is set: give --tasks SOURCE (in Python tasks=), or set tuner.tasks")
    _check_readable(settings, own, caller)


def _check_readable(settings: Settings, own: Mapping[str, Any], caller: RunCaller) -> None:
    """Read the task sets and load the workflows. Raises TaskSetError, WorkflowError."""
    from ratchet.trainer.tasks import TEST, TRAIN
    from ratchet.tuner.rollouts.workflow import load_workflow
    from ratchet.tuner.tasks.task_mix import parse_families

    given = caller.workflow or settings.tuner_settings().workflow
    plan = _plan(settings, own, None if given is None else load_workflow(given).name, caller)
    families = parse_families(plan.families, partial(tuning.task_set_of, settings))
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


def _check_running_trainer(settings: Settings, *, has_judge: bool) -> None:
    """Raise InvalidArgument if no trainer runs, if it expects another group size, or uses another judge.

    `has_judge`: the run brings its own judge.
    """
    from ratchet.trainer.settings.judge_specs import read_spec
    from ratchet.trainer.settings.trainer_settings import TrainerSettings

    default = TrainerSettings.model_fields["num_generations"].default
    run = load_settings.read_last_run(settings)
    shared, own = run.get("trainer") or {}, (run.get("agents") or {}).get(settings.model) or {}
    judge = own.get("judge") or shared.get("judge")
    if "trainer" not in read_run_state(settings.state).get("services", {}):
        raise InvalidArgument(
            f"project {settings.project} runs without a trainer: set trainer.judge in ratchet.yaml and restart it, or "
            "stop it so that services are started for this run"
        )
    if not has_judge and judge is not None and read_spec(judge) != read_spec(settings.trainer["judge"]):
        raise InvalidArgument(
            f"--judge {settings.trainer['judge']}: the running trainer uses {judge}: leave the judge out, or stop the "
            "project so that services are started for this run"
        )
    running = shared.get("num_generations", default)
    wanted = settings.trainer_settings(base_model=settings.base_model).num_generations
    if wanted != running:
        raise InvalidArgument(
            f"--attempts {wanted}: the running trainer uses {running} rollouts per task (trainer.num_generations): "
            f"give --attempts {running}, or stop the project so that services are started for this run"
        )
