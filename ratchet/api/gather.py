"""`ratchet.gather`: groups of recorded rollouts with rewards, which are trained only by `ratchet.train`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ratchet.api.arguments import AnyJudge, AnyWorkflow, read_arguments
from ratchet.api.event_loop import run_to_end
from ratchet.api.runs import start
from ratchet.api.tasks import Tasks
from ratchet.errors import InvalidArgument
from ratchet.trainer.tasks import TRAIN
from ratchet.tuner.rollouts.trajectory_groups import TrajectoryGroup
from ratchet.tuning import gather_groups
from ratchet.tuning.caller import RunCaller
from ratchet.tuning.context import open_store
from ratchet.tuning.gather_groups import GatherOptions
from ratchet.tuning.run_services import run_services

Scenarios = Iterable[Mapping[str, Any]] | Tasks


def gather(
    workflow: AnyWorkflow | None = None,
    scenarios: Scenarios = (),
    judge: AnyJudge | None = None,
    *,
    attempts: int = 4,
    model: str | None = None,
    step: int = 0,
    concurrency: int | None = None,
    agent: str | None = None,
    base_model: str | None = None,
    project: str | None = None,
    config: str | Path | None = None,
    resume: str | None = None,
) -> list[TrajectoryGroup]:
    """Run a workflow several times on each scenario, record and score the rollouts, and return a group for each.

    Nothing is trained before `ratchet.train(groups)`. A bar, or a line every 10 s, shows the progress. Also in a
    notebook.

    workflow     a function, sync or async, `module:function`, or a command line; it runs in an event loop of its own
    scenarios    rows, which the workflow gets as `task`, or `ratchet.Tasks(...)`; equal rows are one scenario
    judge        a function, `module:function`, or the mapping of a judge's kind, such as
                 `{"kind": "ruler", "base_url": ..., "model": ...}`; None: the project's, else the workflow's reward
    attempts     at each scenario: the group size
    model        a version, such as `policy@4`; None: the live one
    step         the number of the caller's step, stored with the rollouts
    concurrency  rollouts that run at the same time
    agent        the project's agent, if it has several
    base_model   start the project with this model if it does not run; one that runs with another is refused
    project      the project's name
    config       the project's settings file; None: ratchet.yaml of the current folder
    resume       the id of a run that ended early, with the same workflow, scenarios and judge; or of a finished one,
                 whose groups are returned: `group.run`

    A failed rollout stays in its group, without a reward. Raises RatchetError: TooManyFailures if all of the first 16
    rollouts failed; RunCancelled, which names the id to resume; WorkflowError, JudgeError, SettingsError.
    """
    return run_to_end(gather_async(**locals()))


async def gather_async(
    workflow: AnyWorkflow | None = None,
    scenarios: Scenarios = (),
    judge: AnyJudge | None = None,
    *,
    attempts: int = 4,
    model: str | None = None,
    step: int = 0,
    concurrency: int | None = None,
    agent: str | None = None,
    base_model: str | None = None,
    project: str | None = None,
    config: str | Path | None = None,
    resume: str | None = None,
) -> list[TrajectoryGroup]:
    """Do what `gather` does, beside the running event loop."""
    if isinstance(scenarios, (str, Path, Mapping)):
        raise InvalidArgument(f"scenarios is {scenarios!r:.100}: give rows, or `ratchet.Tasks({scenarios!r:.60})`")
    split = scenarios.split if isinstance(scenarios, Tasks) else TRAIN
    wanted = GatherOptions(tuple(scenarios), attempts, split, model, step, resume)
    wanted.check()
    shared = {"tasks": None, "attempts": None, "seed": None, "test_size": None}
    given = read_arguments(
        shared | {
            "workflow": workflow, "judge": judge, "concurrency": concurrency, "agent": agent, "base_model": base_model,
            "project": project, "config": config,
        }
    )  # fmt: skip

    def work(caller: RunCaller) -> None:
        check = partial(gather_groups.check_usable, given.settings, caller)
        with run_services(given.settings, caller, (model or given.settings.model,), check):
            gather_groups.gather(given.settings, wanted, caller)

    run = await (await start(given, gather_groups.KIND, resume, work))
    with open_store(given.settings.store_url, create=False) as store:
        return gather_groups.gathered(store, run.id)
