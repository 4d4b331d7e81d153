"""The tuner's components, built from settings and options: store, proxy, workflow, judge, prices, task set."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ratchet import options
from ratchet.tuning.run_lease import RunLease

if TYPE_CHECKING:
    from ratchet.settings.project_settings import Settings
    from ratchet.store.store import Store
    from ratchet.trainer.controller.judges import Judge
    from ratchet.trainer.observability.progress import Progress
    from ratchet.trainer.tasks.task_set import Task, TaskSet
    from ratchet.tuner.rollouts.prices import Prices
    from ratchet.tuner.rollouts.runner import RolloutRunner
    from ratchet.tuner.rollouts.scoring import RolloutScorer
    from ratchet.tuner.settings.tuner_settings import TunerSettings

EXIT_NOT_BETTER = 3  # exit code without a better result, with --fail-unless-better
_Command = TypeVar("_Command", bound=Callable[..., Any])

_OPTIONS = (
    options.tasks,
    options.test_size,
    options.workflow,
    options.judge,
    options.attempts,
    options.concurrency,
    options.seed,
    options.proxy_url,
    options.store_url,
    options.project,
)


fail_unless_better = click.option(
    "--fail-unless-better",
    is_flag=True,
    help=f"Exit with {EXIT_NOT_BETTER} unless something is shown to be better.",
)


def add_rollout_options(command: _Command) -> _Command:
    """Add the options of commands that run rollouts."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def settings_of(context: click.Context, given: dict[str, Any]) -> Settings:
    """Return the settings of the project's agent, overridden by the options of `add_rollout_options`."""
    tuner = ("tasks", "test_size", "workflow", "attempts", "concurrency", "seed")
    names = {"judge": "trainer.judge", "proxy": "tuner.proxy_url"} | {name: f"tuner.{name}" for name in tuner}
    return options.read_agent_settings(context, {names.get(key, key): value for key, value in given.items()})


def with_run_settings(settings: Settings, run: str | None) -> Settings:
    """Return the settings with the resumed run's workflow and judge as defaults. Raises StoreError."""
    if run is None:
        return settings
    with options.open_store_for_command(settings.store_url, create=False) as store:
        config = store.tunings.get(run).config
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

    def source(self) -> str:
        """Return the source of the task set. Raises UsageError if none is set."""
        if self.tuner.tasks is None:
            raise click.UsageError("no task set is set: give --tasks SOURCE, or set tuner.tasks")
        return str(self.tuner.tasks)

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


@contextmanager
def opened(settings: Settings) -> Iterator[TuningContext]:
    """Open the components. Raises UsageError, SettingsError, WorkflowError, JudgeError, StoreError, TuningError."""
    from ratchet.trainer.observability.progress import Progress, watch_for_command
    from ratchet.trainer.statistics.sign_flip_test import check_scipy
    from ratchet.tuner.rollouts.prices import prices_of
    from ratchet.tuner.rollouts.runner import RolloutRunner
    from ratchet.tuner.rollouts.scoring import RolloutScorer
    from ratchet.tuner.rollouts.workflow import load_workflow

    tuner = settings.tuner_settings()
    if tuner.workflow is None:
        raise click.UsageError("no workflow is set: give --workflow module:function, or set tuner.workflow")
    check_scipy()
    workflow = load_workflow(tuner.workflow)
    progress = Progress(watch_for_command())
    proxy_url, key = tuner.proxy_url or proxy_of(settings), first_api_key()
    with options.open_store_for_command(settings.store_url) as store, judge_of(settings) as judge:
        lease = RunLease(store)
        yield TuningContext(
            settings=settings, tuner=tuner, store=store, proxy_url=proxy_url, api_key=key, progress=progress,
            lease=lease, runner=RolloutRunner(
                store, proxy_url, key, workflow, tuner, alias=settings.model, progress=progress, check=lease.check
            ),
            scorer=RolloutScorer(store, judge, alias=settings.model, max_wait_seconds=tuner.judge_wait_seconds,
            progress=progress), prices=prices_of((entry.model_dump() for entry in settings.model_list), tuner.prices),
        )  # fmt: skip


@contextmanager
def judge_of(settings: Settings) -> Iterator[Judge | None]:
    """Make the project's judge; None if none is set."""
    from ratchet.trainer.controller.judges.make_judge import make_judge

    if not settings.has_judge:
        yield None
        return
    made = make_judge(settings.trainer_settings(base_model=settings.base_model or "unused").judge, os.environ)
    try:
        yield made
    finally:
        made.close()


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
