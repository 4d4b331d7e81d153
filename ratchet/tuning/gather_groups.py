"""Gather groups of rollouts through the project's proxy: run, recorded, scored, and trained only on request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ratchet.errors import InvalidArgument
from ratchet.tuning import context as tuning
from ratchet.tuning.caller import RunCaller

if TYPE_CHECKING:
    from ratchet.settings.project_settings import Settings
    from ratchet.store.operation_records import Rollout
    from ratchet.store.store import Store
    from ratchet.trainer.tasks import Task
    from ratchet.tuner.rollouts.runner import RolloutJob
    from ratchet.tuner.rollouts.trajectory_groups import ScoredTrajectory, TrajectoryGroup

KIND = "gather"
_CANDIDATE = "gathered"


@dataclass(frozen=True, slots=True)
class GatherOptions:
    """What is gathered. `resume`: the id of a run that ended early."""

    scenarios: Sequence[Mapping[str, Any]]
    attempts: int
    split: str
    model: str | None
    step: int
    resume: str | None

    def check(self) -> None:
        """Raise InvalidArgument, which names the argument."""
        if not self.scenarios and self.resume is None:
            raise InvalidArgument("scenarios is empty: give one or more rows, such as [{'question': ...}]")
        if wrong := [row for row in self.scenarios if not isinstance(row, Mapping)]:
            raise InvalidArgument(f"scenarios holds {wrong[0]!r:.100}: give rows, such as {{'question': ...}}")
        for number, row in enumerate(self.scenarios):
            try:
                json.dumps(row, ensure_ascii=False, default=str, skipkeys=True).encode()
            except UnicodeEncodeError as error:
                raise InvalidArgument(
                    f"scenarios[{number}] holds half of a surrogate pair ({error.object[error.start]!a}), which is no "
                    "text: write the whole pair, or leave it out"
                ) from error
        if self.attempts < 2:
            raise InvalidArgument(
                f"attempts is {self.attempts}: the rewards of a group are compared, so give 2 or more"
            )


def check_usable(settings: Settings, caller: RunCaller) -> None:
    """Load workflow and judge, before anything is started. Raises what `gather` does."""
    from ratchet.tuner.rollouts.workflow import load_workflow

    load_workflow(tuning.workflow_of(settings, caller))
    with tuning.judge_of(settings, caller.judge):
        pass


def gather(settings: Settings, wanted: GatherOptions, caller: RunCaller) -> None:
    """Run and score the rollouts that are missing.

    Raises TuningError, TooManyFailures, and what `opened` does.
    """
    from ratchet.tuner.rollouts.runner import final_rollouts, pending_jobs

    with tuning.opened(settings, caller) as context:
        store = context.store
        name = wanted.resume or store.tunings.begin(KIND, settings.model, _config(context.workflow, wanted)).id
        with context.lease.acquire(name, resume=wanted.resume is not None) as run:
            jobs = _jobs(wanted)
            if missing := pending_jobs(jobs, store.rollouts.of_tuning(run.id)):
                asyncio.run(context.runner.run(missing, run.id))
            keys = {job.key for job in jobs}
            made = [one for one in final_rollouts(store.rollouts.of_tuning(run.id)) if _key(one) in keys]
            explanations: dict[str, str] = {}
            scored = context.scorer.score(
                made, lambda verdict: explanations.update({verdict.trajectory_id: verdict.explanation})
            )
            _check_scored(scored)
            result = {"rollouts": [one.id for one in made], "explanations": explanations}
            store.tunings.end(run.id, "done", result)


def _check_scored(scored: Sequence[Rollout]) -> None:
    """Raise TuningError if every judgement failed. A workflow without a reward leaves the scores to the caller."""
    from ratchet.store.states import RolloutState
    from ratchet.trainer.controller.judges.kinds.workflow_reward import NO_REWARD
    from ratchet.trainer.errors import TuningError
    from ratchet.tuner.rollouts.scoring import NO_JUDGE
    from ratchet.tuner.selection.choice import commonest

    failures = [one.judge_failure for one in scored if one.state is RolloutState.ENDED]
    if failures and None not in failures and not {NO_JUDGE, NO_REWARD} & set(failures):
        raise TuningError(f"no rollout could be scored: {commonest(failures)}")


def gathered(store: Store, run: str) -> list[TrajectoryGroup]:
    """Return the groups of a finished run, in the order of its scenarios."""
    from ratchet.tuner.rollouts.trajectory_groups import TrajectoryGroup

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
    from ratchet.store.errors import RecordNotFound
    from ratchet.tuner.rollouts.trajectory_groups import ScoredTrajectory

    try:
        messages = store.trajectories.read(one.id, tokens=False).messages
    except RecordNotFound:  # no call reached the proxy
        messages = ()
    return ScoredTrajectory(
        reward=one.score, id=one.id, messages=messages, metrics=one.metrics, explanation=explanation,
        response=None if one.response is None else json.loads(one.response),
        failure=one.failure or one.judge_failure,
    )  # fmt: skip


def _config(workflow: str, wanted: GatherOptions) -> dict[str, Any]:
    return {
        "workflow": workflow, "attempts": wanted.attempts, "model": wanted.model, "scenarios": len(wanted.scenarios),
        "step": wanted.step,
    }  # fmt: skip


def _jobs(wanted: GatherOptions) -> list[RolloutJob]:
    from ratchet.store.records import GATHERED
    from ratchet.tuner.rollouts.runner import RolloutJob

    return [
        RolloutJob(task, attempt, _CANDIDATE, wanted.model, GATHERED, step=wanted.step)
        for task in _tasks(wanted)
        for attempt in range(wanted.attempts)
    ]


def _tasks(wanted: GatherOptions) -> list[Task]:
    """Return each different scenario once, as a task."""
    from ratchet.trainer.tasks import Task, content_id

    tasks: dict[str, Task] = {}
    for number, row in enumerate(wanted.scenarios, 1):
        name = content_id(row)
        tasks.setdefault(name, Task(name, dict(row), wanted.split, number, _CANDIDATE))
    return list(tasks.values())


def _key(one: Rollout) -> tuple[str, str, int, int]:
    return one.candidate, one.task_id, one.attempt, one.step
