"""`ratchet.gather`: groups of recorded rollouts with rewards, which are trained only by `ratchet.train`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ratchet.api.arguments import AnyJudge, AnyWorkflow, Tasks, read_arguments
from ratchet.api.context import judge_of, open_store, opened, run_services, workflow_of
from ratchet.api.event_loop import synchronous
from ratchet.api.run_lease import RunCaller
from ratchet.api.runs import start
from ratchet.errors import InvalidArgument
from ratchet.settings.project_settings import Settings
from ratchet.store.errors import RecordNotFound
from ratchet.store.operation_records import Rollout
from ratchet.store.records import GATHERED
from ratchet.store.states import RolloutState
from ratchet.store.store import Store
from ratchet.trainer.controller.judges.kinds.given_scores import NO_REWARD
from ratchet.trainer.errors import TuningError
from ratchet.trainer.tasks import TRAIN, Task, content_id
from ratchet.tuner.rollouts.runner import RolloutJob, final_rollouts, pending_jobs
from ratchet.tuner.rollouts.scoring import NO_JUDGE
from ratchet.tuner.rollouts.workflow import load_workflow
from ratchet.tuner.selection.model_selection import commonest
from ratchet.tuner.weights.trajectory_groups import ScoredTrajectory, TrajectoryGroup

Scenarios = Iterable[Mapping[str, Any]] | Tasks
_KIND = "gather"
_CANDIDATE = "gathered"


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
    """Run a workflow several times on each scenario, record and score the rollouts, and return a group for each.

    Nothing is trained before `ratchet.train(groups)`. A bar, or a line every 10 s, shows the progress. Also in a
    notebook; `gather_async` is for an event loop that runs already.

    scenarios  rows, which the workflow gets as `task`, or `ratchet.Tasks(...)`; equal rows are one scenario
    judge      a function, `module:function`, or the mapping of a judge's kind, such as
               `{"kind": "ruler", "base_url": ..., "model": ...}`; None: the project's, else the workflow's reward
    attempts   at each scenario: the group size
    model      a version, such as `policy@4`; None: the live one
    step       the number of the caller's step, stored with the rollouts
    resume     the id of a run that ended early, with the same workflow, scenarios and judge; or of a finished one,
               whose groups are returned: `group.run`

    The other arguments are those of `evaluate`. A failed rollout stays in its group, without a reward. Raises
    RatchetError: TooManyFailures if all of the first 16 rollouts failed; RunCancelled, which names the id to resume;
    WorkflowError, JudgeError, SettingsError.
    """
    arguments = locals() | {"attempts": None}  # not the setting, which is of evaluations
    if isinstance(scenarios, (str, Path, Mapping)):
        raise InvalidArgument(f"scenarios is {scenarios!r:.100}: give rows, or `ratchet.Tasks({scenarios!r:.60})`")
    rows = tuple(scenarios)
    _check_scenarios(rows, attempts, resume)
    given = read_arguments(arguments)
    tasks = _tasks(rows, scenarios.split if isinstance(scenarios, Tasks) else TRAIN)
    jobs = [
        RolloutJob(task, attempt, _CANDIDATE, model, GATHERED, step=step)
        for task in tasks
        for attempt in range(attempts)
    ]
    config_of_run = {"attempts": attempts, "model": model, "scenarios": len(rows), "step": step}

    def work(caller: RunCaller) -> None:
        check = partial(_check_usable, given.settings, caller)
        with run_services(given.settings, caller, (model or given.settings.model,), check):
            _gather(given.settings, jobs, config_of_run, resume, caller)

    run = await (await start(given, _KIND, resume, work))
    with open_store(given.settings.store_url, create=False) as store:
        return _gathered(store, run.id)


gather = synchronous(gather_async)


def _check_scenarios(rows: Sequence[Mapping[str, Any]], attempts: int, resume: str | None) -> None:
    """Raise InvalidArgument, which names the argument."""
    if not rows and resume is None:
        raise InvalidArgument("scenarios is empty: give one or more rows, such as [{'question': ...}]")
    if wrong := [row for row in rows if not isinstance(row, Mapping)]:
        raise InvalidArgument(f"scenarios holds {wrong[0]!r:.100}: give rows, such as {{'question': ...}}")
    for number, row in enumerate(rows):
        try:
            json.dumps(row, ensure_ascii=False, default=str, skipkeys=True).encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument(
                f"scenarios[{number}] holds half of a surrogate pair ({error.object[error.start]!a}), which is no "
                "text: write the whole pair, or leave it out"
            ) from error
    if attempts < 2:
        raise InvalidArgument(f"attempts is {attempts}: the rewards of a group are compared, so give 2 or more")


def _tasks(rows: Sequence[Mapping[str, Any]], split: str) -> list[Task]:
    """Return each different scenario once, as a task."""
    tasks: dict[str, Task] = {}
    for number, row in enumerate(rows, 1):
        name = content_id(row)
        tasks.setdefault(name, Task(name, dict(row), split, number, _CANDIDATE))
    return list(tasks.values())


def _check_usable(settings: Settings, caller: RunCaller) -> None:
    """Load workflow and judge, before anything is started."""
    load_workflow(workflow_of(settings, caller))
    with judge_of(settings, caller.judge):
        pass


def _gather(
    settings: Settings, jobs: Sequence[RolloutJob], config: Mapping[str, Any], resume: str | None, caller: RunCaller
) -> None:
    """Run and score the rollouts that are missing. Raises TuningError, TooManyFailures, and what `opened` does."""
    with opened(settings, caller) as context:
        store = context.store
        name = resume or store.tunings.begin(_KIND, settings.model, {"workflow": context.workflow, **config}).id
        with context.lease.acquire(name, resume=resume is not None) as run:
            if missing := pending_jobs(jobs, store.rollouts.of_tuning(run.id)):
                asyncio.run(context.runner.run(missing, run.id))
            made = final_rollouts(store.rollouts.of_tuning(run.id), jobs)
            explanations: dict[str, str] = {}
            scored = context.scorer.score(
                made, lambda verdict: explanations.update({verdict.trajectory_id: verdict.explanation})
            )
            failures = [one.judge_failure for one in scored if one.state is RolloutState.ENDED]
            # A workflow without a reward leaves the scores to the caller.
            if failures and None not in failures and not {NO_JUDGE, NO_REWARD} & set(failures):
                raise TuningError(f"no rollout could be scored: {commonest(failures)}")
            store.tunings.end(
                run.id, "done", {"rollouts": [one.id for one in made], "explanations": explanations}
            )  # fmt: skip


def _gathered(store: Store, run: str) -> list[TrajectoryGroup]:
    """Return the groups of a finished run, in the order of its scenarios."""
    result = store.tunings.get(run).result or {}
    wanted = {name: place for place, name in enumerate(result["rollouts"])}
    by_task: dict[str, list[Rollout]] = {}
    found = [one for one in store.rollouts.of_tuning(run, responses=True) if one.id in wanted]
    for one in sorted(found, key=lambda one: wanted[one.id]):
        by_task.setdefault(one.task_id, []).append(one)
    groups = []
    for task, rollouts in by_task.items():
        row = store.tasks.get(task)
        members = [_trajectory(store, one, result["explanations"].get(one.id, "")) for one in rollouts]
        groups.append(TrajectoryGroup(tuple(members), {} if row is None else row.content, run))
    return groups


def _trajectory(store: Store, one: Rollout, explanation: str) -> ScoredTrajectory:
    try:
        messages = store.trajectories.read(one.id, tokens=False).messages
    except RecordNotFound:  # no call reached the proxy
        messages = ()
    return ScoredTrajectory(
        reward=one.score, id=one.id, messages=messages, metrics=one.metrics, explanation=explanation,
        response=None if one.response is None else json.loads(one.response),
        failure=one.failure or one.judge_failure,
    )  # fmt: skip
