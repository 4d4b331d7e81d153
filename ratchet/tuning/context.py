"""The tuner's components, built from settings and options: store, proxy, workflow, judge, prices, task set."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ratchet.errors import InvalidArgument
from ratchet.tuning.caller import COMMAND, Function, RunCaller
from ratchet.tuning.run_lease import RunLease

if TYPE_CHECKING:
    from ratchet.settings.project_settings import Settings
    from ratchet.store.operation_records import Tuning
    from ratchet.store.store import Store
    from ratchet.trainer.controller.judges import Judge
    from ratchet.trainer.observability.progress import Progress
    from ratchet.trainer.tasks import Task, TaskSet
    from ratchet.trainer.user_code.entry_points import ModelServer
    from ratchet.tuner.rollouts.prices import Prices
    from ratchet.tuner.rollouts.runner import RolloutRunner
    from ratchet.tuner.rollouts.scoring import RolloutScorer
    from ratchet.tuner.settings import TunerSettings

_TUNER = ("tasks", "test_size", "workflow", "attempts", "concurrency", "seed")
_SETTINGS = {"judge": "trainer.judge", "proxy": "tuner.proxy_url"} | {name: f"tuner.{name}" for name in _TUNER}


def setting_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options or arguments by the names of their settings."""
    return {_SETTINGS.get(key, key): value for key, value in given.items()}


def open_store(url: str, *, create: bool = True) -> closing[Store]:
    """Open a store for a block."""
    from ratchet.store.store import open_store as open_

    return closing(open_(url, create=create))


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
    tuner, trainer = dict(settings.tuner), dict(settings.trainer)
    if tuner.get("workflow") is None and (workflow := config.get("workflow")):
        tuner["workflow"] = workflow
    if not settings.has_judge and (judge := config.get("judge_given")):
        trainer["judge"] = judge
    return settings.model_copy(update={"tuner": tuner, "trainer": trainer})


@dataclass(frozen=True)
class TuningContext:
    """Components that run and judge rollouts, open while a command runs."""

    settings: Settings
    tuner: TunerSettings
    store: Store
    proxy_url: str
    api_key: str | None
    runner: RolloutRunner
    scorer: RolloutScorer
    prices: Prices
    progress: Progress
    lease: RunLease
    workflow: str  # its name

    def source(self) -> str:
        """Return the source of the task set. Raises InvalidArgument if none is set."""
        return source_of(self.settings)

    def task_set(self, source: str) -> TaskSet:
        """Return the task set. Raises TaskSetError."""
        return task_set_of(self.settings, source)

    def tasks(self, source: str, split: str, limit: int | None = None) -> list[Task]:
        """Return the tasks of a split. Raises TaskSetError."""
        return list(self.task_set(source).rows(split, limit))


def task_set_of(settings: Settings, source: str) -> TaskSet:
    """Open a task set, split as the settings say. Raises TaskSetError."""
    from ratchet.tuner.tasks.imported import ImportedTasks

    tuner = settings.tuner_settings()
    found = ImportedTasks(settings.state.tasks).open(source)
    return found if tuner.test_size is None else found.split(1 - tuner.test_size, tuner.seed)


def check_usable(settings: Settings, caller: RunCaller, split: str | None = None) -> None:
    """Load workflow and judge, and read the task set (of a `split` one row), before anything is started.

    Raises InvalidArgument, SettingsError, WorkflowError, JudgeError, TaskSetError.
    """
    from ratchet.trainer.statistics import check_scipy
    from ratchet.tuner.rollouts.workflow import load_workflow

    check_scipy()
    load_workflow(workflow_of(settings, caller))
    with judge_of(settings, caller.judge):
        tasks = task_set_of(settings, source_of(settings))
        if split is not None:
            next(iter(tasks.rows(split, 1)), None)


def workflow_of(settings: Settings, caller: RunCaller) -> str | Function:
    """Return the workflow of the caller or the settings. Raises InvalidArgument if there is none."""
    given = caller.workflow or settings.tuner_settings().workflow
    if given is None:
        raise InvalidArgument(
            "no workflow is set: give --workflow module:function (in Python workflow=), or set tuner.workflow"
        )
    return given


def source_of(settings: Settings) -> str:
    """Return the source of the task set. Raises InvalidArgument if none is set."""
    source = settings.tuner_settings().tasks
    if source is None:
        raise InvalidArgument("no task set is set: give --tasks SOURCE (in Python tasks=), or set tuner.tasks")
    return source


@contextmanager
def opened(settings: Settings, caller: RunCaller = COMMAND) -> Iterator[TuningContext]:
    """Open the components.

    Raises InvalidArgument, SettingsError, WorkflowError, JudgeError, StoreError, TuningError.
    """
    from ratchet.trainer.observability.progress import Progress, watch_for_command
    from ratchet.trainer.statistics import check_scipy
    from ratchet.tuner.rollouts.prices import prices_of
    from ratchet.tuner.rollouts.runner import RolloutRunner
    from ratchet.tuner.rollouts.scoring import RolloutScorer
    from ratchet.tuner.rollouts.workflow import load_workflow

    tuner = settings.tuner_settings()
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
    from ratchet.trainer.controller.judges.kinds.function import FunctionJudge
    from ratchet.trainer.controller.judges.make_judge import make_judge

    if function is None and not settings.has_judge:
        yield None
        return
    made: Judge
    if function is not None:
        made = FunctionJudge(function, models=models)
    else:
        made = make_judge(settings.trainer_settings(base_model=settings.base_model or "unused").judge, os.environ)
    try:
        yield made
    finally:
        made.close()


def model_server_of(settings: Settings) -> ModelServer:
    """Return the proxy as the server of the models that a judge may ask for."""
    from ratchet.trainer.user_code.entry_points import ModelServer

    url = settings.tuner_settings().proxy_url or proxy_of(settings)
    return ModelServer(f"{url.rstrip('/').removesuffix('/v1')}/v1", first_api_key())


def proxy_of(settings: Settings) -> str:
    """Return the URL of the running project's proxy, or the one in the settings."""
    try:
        running = json.loads(settings.state.running.read_text())
        return str(running["base_url"]).removesuffix("/v1")
    except (OSError, ValueError, KeyError, TypeError):
        own = settings.proxy_settings()
        from ratchet.settings.project_settings import local_url

        return local_url(own.host, own.port, tls=own.tls_certificate is not None)


def first_api_key() -> str | None:
    """Return the API key of the rollouts: the first of RATCHET_API_KEYS."""
    return os.environ.get("RATCHET_API_KEYS", "").split(",")[0].strip() or None
