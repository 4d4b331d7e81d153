"""`ratchet.tune`: reinforcement learning on a task set, and the version that is best on tasks held out."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from ratchet.api.arguments import AnyJudge, AnyTasks, AnyWorkflow, Function, read_arguments
from ratchet.api.event_loop import run_to_end
from ratchet.api.families import Families, Family, read_families
from ratchet.api.runs import TuningRun, start
from ratchet.errors import InvalidArgument
from ratchet.output import print_note
from ratchet.settings.project_settings import Settings
from ratchet.supervisor.up import attach_or_start, read_run_state
from ratchet.trainer.controller.judges.kinds.function import FunctionJudge
from ratchet.tuning import tune_weights
from ratchet.tuning.caller import RunCaller
from ratchet.tuning.judge_server import JudgeServer

_PLANNED = (
    "rounds", "tasks_per_round", "eval_every", "eval_tasks", "validation_tasks", "eval_attempts", "eval_workflow",
    "patience", "collect", "resume",
)  # fmt: skip
_JUDGE = "judge"  # place of the only function


def tune(
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
    return run_to_end(tune_async(**locals()))


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
    """Do what `tune` does, beside the running event loop: `await (await tune_async(...))`."""
    arguments = locals()
    parts = None if families is None else _families(families, workflow, judge, tasks)
    default = workflow if not families else next(iter(families.values())).workflow  # every family has its own
    given = read_arguments(arguments | {"workflow": default}, (), tune_weights.setting_names)
    own = {name: arguments[name] for name in _PLANNED} | {
        "families": parts.sources if parts is not None and resume is None else (),
        "family_workflow": parts.workflow_names if parts is not None and resume is None else (),
        "warm_start": tuple(warm_start),
        "warm_start_setting": [f"{key}={json.dumps(value)}" for key, value in (warm_start_settings or {}).items()],
    }
    fixed = _of_services(settings or {})
    if fixed and read_run_state(given.settings.state):
        raise InvalidArgument(
            f"project {given.settings.project} runs with its own settings: leave {fixed[0]} out of settings=, or stop "
            "the project so that services are started for this run"
        )
    running = bool(read_run_state(given.settings.state))
    if parts is not None:
        functions = parts.functions(importable=running)
    else:
        functions = {} if given.judge is None else {_JUDGE: given.judge}

    def work(caller: RunCaller) -> None:
        used, planned = given.settings, dict(own)
        with ExitStack() as stack:
            served = _serve(stack, used, functions, resume)
            if parts is not None:
                caller = replace(caller, families=parts.workflows)
            judge = served.get(_JUDGE) if parts is None else parts.judge(served)
            if judge is not None:
                used = _with_judge(used, judge)
                planned["run_judge"] = judge if served or running else None
            used = tune_weights.prepare(used, planned, caller)
            services = stack.enter_context(attach_or_start(used, print_note, caller.check))
            tune_weights.tune(used, planned, services, caller)

    return await start(given, "weights", resume, work)


def _serve(
    stack: ExitStack, settings: Settings, functions: Mapping[str, Function | str], resume: str | None
) -> dict[str, Any]:
    """Serve functions until `stack` ends, of a resumed run at its old place; return their specifications by name."""
    if not functions:
        return {}
    address = resume and tune_weights.judge_address(settings, resume)
    file = settings.state.judges.resolve() / (address or f"{secrets.token_hex(8)}.json")
    judges = {name: FunctionJudge(function) for name, function in functions.items()}
    server = stack.enter_context(JudgeServer(judges, file, settings.tuner_settings().judge_away_seconds))
    return {name: server.spec(name) for name in functions}


def _of_services(settings: Mapping[str, Any]) -> list[str]:
    """Return the keys that are settings of vLLM, proxy, trainer or learner."""
    return [name for name in settings if name not in ("tuner", "project", "state_dir")]


def _families(
    families: Mapping[str, Family], workflow: AnyWorkflow | None, judge: AnyJudge | None, tasks: AnyTasks | None
) -> Families:
    """Read the families. Raises InvalidArgument if something is given twice."""
    given = {"workflow": workflow, "judge": judge, "tasks": tasks}
    if twice := [name for name, value in given.items() if value is not None]:
        raise InvalidArgument(f"families= has workflow, judge and tasks of each family: leave {twice[0]}= out")
    return read_families(families)


def _with_judge(settings: Settings, judge: Mapping[str, Any]) -> Settings:
    return settings.model_copy(update={"trainer": {**settings.trainer, "judge": judge}})
