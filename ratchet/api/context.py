"""What the runs of the tuner share, from settings and options: workflow, judge, task set, store, proxy and services.

Commands and Python use this alike. Rollouts on models of `model_list` need the proxy only, and no base model.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from ratchet.api.run_lease import COMMAND, Function, RunCaller, RunLease
from ratchet.errors import InvalidArgument
from ratchet.output import print_note
from ratchet.settings.project_settings import Settings, local_url
from ratchet.settings.setting_errors import listed
from ratchet.store.coordination import PROXY_TIMEOUT_SECONDS
from ratchet.store.errors import StoreError
from ratchet.store.operation_records import Tuning
from ratchet.store.store import open_store
from ratchet.supervisor.up import attach_or_start, read_run_state
from ratchet.trainer.judges.judgement import Judge
from ratchet.trainer.judges.kinds.function import FunctionJudge
from ratchet.trainer.judges.make_judge import make_judge
from ratchet.trainer.observability.progress import Progress, watch_for_command
from ratchet.trainer.statistics import check_scipy
from ratchet.trainer.tasks import TaskSet
from ratchet.trainer.user_code import ModelServer
from ratchet.tuner.rollouts.prices import prices_of
from ratchet.tuner.rollouts.runner import RolloutRunner, first_api_key
from ratchet.tuner.rollouts.scoring import RolloutScorer, RolloutTools
from ratchet.tuner.rollouts.workflow import load_workflow
from ratchet.tuner.settings import TunerSettings
from ratchet.tuner.tasks import ImportedTasks

_HEALTH_TIMEOUT = 5.0  # seconds


def stored_run(settings: Settings, name: str, kind: str | None = None) -> Tuning:
    """Return a run to resume, of this kind if one is given. Raises StoreError, InvalidArgument."""
    with open_store(settings.store_url, create=False) as store:
        run = store.tunings.get(name)
    if kind not in (None, run.kind):
        raise InvalidArgument(f"--resume {name}: that run is a {run.kind} run")
    return run


def with_run_settings(settings: Settings, run: str | None) -> Settings:
    """Return the settings with the resumed run's workflow and judge as defaults. Raises StoreError."""
    if run is None:
        return settings
    config = stored_run(settings, run).config
    judge = {} if settings.has_judge else {"judge": config.get("judge_given")}
    return settings.changed(tuner={"workflow": settings.tuner.workflow or config.get("workflow")}, trainer=judge)


def check_same(run: Tuning, used: Mapping[str, tuple[str | None, str]], what_for: str) -> None:
    """Raise InvalidArgument if a resumed run used something else than what is given now: name -> (then, now)."""
    for what, (then, now) in used.items():
        if then not in (None, now):
            raise InvalidArgument(
                f"--resume {run.id}: the run used the {what} {then}, now it is {now}; use the same {what} for the "
                f"whole {what_for}"
            )


def task_set_of(settings: Settings, source: str | None = None) -> TaskSet:
    """Open a task set, by default that of the settings, split as they say. Raises TaskSetError, InvalidArgument."""
    tuner = settings.tuner
    found = ImportedTasks(settings.state.tasks).open(source or source_of(settings))
    return found if tuner.test_size is None else found.split(1 - tuner.test_size, tuner.seed)


def source_of(settings: Settings) -> str:
    """Return the source of the task set. Raises InvalidArgument if none is set."""
    source = settings.tuner.tasks
    if source is None:
        raise InvalidArgument("no task set is set: give --tasks SOURCE (in Python tasks=), or set tuner.tasks")
    return source


def workflow_of(settings: Settings, caller: RunCaller) -> str | Function:
    """Return the workflow of the caller or the settings. Raises InvalidArgument if there is none."""
    given = caller.workflow or settings.tuner.workflow
    if given is None:
        raise InvalidArgument(
            "no workflow is set: give --workflow module:function (in Python workflow=), or set tuner.workflow"
        )
    return given


def check_usable(settings: Settings, caller: RunCaller, split: str | None = None) -> None:
    """Load workflow and judge, and read the task set (of a `split` one row), before anything is started.

    Raises InvalidArgument, SettingsError, WorkflowError, JudgeError, TaskSetError.
    """
    check_scipy()
    load_workflow(workflow_of(settings, caller))
    with judge_of(settings, caller.judge):
        tasks = task_set_of(settings)
        if split is not None:
            next(iter(tasks.rows(split, 1)), None)


@dataclass(frozen=True, kw_only=True)
class TuningContext(RolloutTools):
    """Components that run and judge rollouts, open while a run goes on."""

    settings: Settings
    tuner: TunerSettings
    proxy_url: str
    api_key: str | None
    lease: RunLease
    workflow: str  # its name


@contextmanager
def opened(settings: Settings, caller: RunCaller = COMMAND) -> Iterator[TuningContext]:
    """Open the components.

    Raises InvalidArgument, SettingsError, WorkflowError, JudgeError, StoreError, TuningError.
    """
    tuner = settings.tuner
    given = workflow_of(settings, caller)
    check_scipy()
    workflow = load_workflow(given)
    progress = Progress(watch_for_command())
    proxy_url, key = tuner.proxy_url or proxy_of(settings), first_api_key()
    with (
        open_store(settings.store_url) as store,
        judge_of(settings, caller.judge, model_server_of(settings)) as judge,
    ):
        lease = RunLease(store, caller)
        # A caller in Python prints what it likes meanwhile, and standard output belongs to the whole process.
        shared: dict[str, Any] = {"progress": progress, "check": lease.check, "keep_stdout": not caller.in_python}
        runner = RolloutRunner(store, proxy_url, key, workflow, tuner, alias=settings.model, **shared)
        scorer = RolloutScorer(store, judge, max_wait_seconds=tuner.judge_wait_seconds, **shared)
        yield TuningContext(
            settings=settings, tuner=tuner, store=store, proxy_url=proxy_url, api_key=key, progress=progress,
            lease=lease, runner=runner, scorer=scorer, workflow=workflow.name,
            prices=prices_of((entry.model_dump() for entry in settings.model_list), tuner.prices),
        )  # fmt: skip


@contextmanager
def judge_of(
    settings: Settings, function: Function | None = None, models: ModelServer | None = None
) -> Iterator[Judge | None]:
    """Make the judge: of the function if one is given, else the project's; None if none is set.

    `models`: the server of the models that such a function may ask for.
    """
    if function is None and not settings.has_judge:
        yield None
        return
    made: Judge
    if function is not None:
        made = FunctionJudge(function, models=models)
    else:
        made = make_judge(settings.trainer.judge, os.environ)
    with closing(made):
        yield made


def model_server_of(settings: Settings) -> ModelServer:
    """Return the proxy as the server of the models that a judge may ask for."""
    url = settings.tuner.proxy_url or proxy_of(settings)
    return ModelServer(f"{url.rstrip('/').removesuffix('/v1')}/v1", first_api_key())


def proxy_of(settings: Settings) -> str:
    """Return the URL of the running project's proxy, or the one in the settings."""
    try:
        running = json.loads(settings.state.running.read_text())
        return str(running["base_url"]).removesuffix("/v1")
    except (OSError, ValueError, KeyError, TypeError):
        own = settings.proxy
        return local_url(own.host, own.port, tls=own.tls_certificate is not None)


@contextmanager
def run_services(
    settings: Settings, caller: RunCaller, models: Collection[str], check: Callable[[], object]
) -> Iterator[None]:
    """Use the proxy that the settings name or that runs; else start what the models need, and nothing that trains.

    models  those that serve the rollouts, as `model_list` or an agent's versions are named
    check   called before anything is started; raises what would end the run later

    Raises InvalidArgument if nothing runs and the models need a base model that is not set; CliError and ProxyError if
    the services cannot be started.
    """
    running = read_run_state(settings.state)
    if settings.tuner.proxy_url or (not running and _proxy_runs(settings)):
        yield
        return
    models_only = bool(models) and set(models) <= set(settings.listed_models)
    if not running:
        if not models_only and settings.base_model is None:
            raise InvalidArgument(_nothing_runs(settings))
        check()
    serving = settings.changed(trainer={"judge": None})
    with attach_or_start(serving, print_note, caller.stop, models_only=models_only):
        yield


def serves_agent(settings: Settings) -> bool:
    """Return whether the rollouts' proxy serves, or will serve, an agent's versions beside `model_list`."""
    if settings.base_model is not None or settings.tuner.proxy_url:
        return True
    running = read_run_state(settings.state)
    return running.get("vllm_url") is not None if running else _proxy_runs(settings)


def _nothing_runs(settings: Settings) -> str:
    remedy = (
        "start it with `ratchet up`, change to its folder, give --config PATH of its ratchet.yaml, or set base_model "
        "to start it for this run (in Python config=, base_model=)"
    )
    if settings.listed_models:
        remedy += f"; models of model_list need neither: {listed(settings.listed_models)}"
    return f"project {settings.project} does not run in {Path.cwd()}: {remedy}"


def _proxy_runs(settings: Settings) -> bool:
    """Return whether a proxy that was started by itself answers; one of another project has another store."""
    try:
        with open_store(settings.store_url, create=False) as store:
            running = store.proxy_instances.running(None, time.time() - PROXY_TIMEOUT_SECONDS)
        url = f"{proxy_of(settings)}/health/live"
        return bool(running) and httpx.get(url, timeout=_HEALTH_TIMEOUT, trust_env=False).status_code == 200
    except (StoreError, httpx.HTTPError, httpx.InvalidURL):
        return False
