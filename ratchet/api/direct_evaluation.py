"""An evaluation on any OpenAI-compatible server: nothing is recorded or stored, and no project is needed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace

from ratchet.api.arguments import Arguments
from ratchet.api.evaluation import Evaluation, evaluation_of
from ratchet.api.try_out import refuse_judge_of_calls, served_model, transcript_of
from ratchet.errors import InvalidArgument
from ratchet.store.operation_records import Rollout
from ratchet.store.records import Transcript
from ratchet.store.states import RolloutState
from ratchet.trainer.controller.judges import GroupJudgement, Judge
from ratchet.trainer.controller.judges.both_orders import judge_in_both_orders
from ratchet.trainer.observability.progress import Phase, Progress, watch_for_command
from ratchet.trainer.statistics import ScoreRange
from ratchet.trainer.tasks import Task
from ratchet.trainer.user_code.entry_points import ModelServer
from ratchet.tuner.rollouts.prices import prices_of
from ratchet.tuner.rollouts.runner import NO_KEY, ROLLOUTS, RolloutJob, describe_error, plan_rollout
from ratchet.tuner.rollouts.scoring import NO_JUDGE
from ratchet.tuner.rollouts.workflow import Workflow, load_workflow
from ratchet.tuner.rollouts.workflow_output import WorkflowOutput
from ratchet.tuner.selection.choice import select
from ratchet.tuner.selection.model_selection import jobs_of_task
from ratchet.tuner.settings import TunerSettings
from ratchet.tuning.compare_models import ComparisonOptions
from ratchet.tuning.context import judge_of, task_set_of


async def evaluate_directly(
    given: Arguments, wanted: ComparisonOptions, *, base_url: str, api_key: str | None
) -> Evaluation:
    """Run, judge and compare. Raises what `ratchet.evaluate` does."""
    settings, tuner = given.settings, given.settings.tuner_settings()
    if wanted.resume is not None:
        raise InvalidArgument("resume= needs the project's store, and with base_url= nothing is stored: leave one out")
    chosen = given.workflow or tuner.workflow
    if chosen is None or tuner.tasks is None:
        raise InvalidArgument(f"no {'workflow' if chosen is None else 'task set'} is set: give workflow= and tasks=")
    workflow = load_workflow(chosen)
    key = api_key or NO_KEY
    models = wanted.candidates or (await served_model(workflow, base_url, key),)
    tasks = list(task_set_of(settings, tuner.tasks).rows(wanted.split, wanted.limit))
    with judge_of(settings, given.judge, ModelServer(base_url, key)) as judge:
        if judge is not None:
            refuse_judge_of_calls(judge)
        run = _DirectRun(workflow, judge, tuner, base_url, key)
        made = await run.of_tasks(tasks, models)
    selection = select(
        made, models, prices_of((), {}), failure_score=tuner.failure_score,
        score_range=ScoreRange(*wanted.score_range) if wanted.score_range else None,
    )  # fmt: skip
    return evaluation_of(None, selection, made, {task.id: task.row for task in tasks})


class _DirectRun:
    """Rollouts at one server. The attempts at a task are judged together, as everywhere."""

    def __init__(
        self, workflow: Workflow, judge: Judge | None, tuner: TunerSettings, base_url: str, api_key: str
    ) -> None:
        self._workflow = workflow
        self._judge = judge
        self._tuner = tuner
        self._address = {"base_url": base_url, "api_key": api_key}
        self._places = asyncio.Semaphore(tuner.concurrency)
        self._judging = asyncio.Semaphore(judge.concurrency if judge is not None else 1)

    async def of_tasks(self, tasks: Sequence[Task], models: Sequence[str]) -> list[Rollout]:
        """Return the rollouts of all tasks."""
        work = Progress(watch_for_command()).begin(ROLLOUTS, len(tasks) * len(models) * self._tuner.attempts)
        try:
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(self._of_task(*one, models, work)) for one in enumerate(tasks)]
        finally:
            work.end()
        return [one for task in running for one in task.result()]

    async def _of_task(self, place: int, task: Task, models: Sequence[str], work: Phase) -> list[Rollout]:
        jobs = [
            job
            for attempt in range(self._tuner.attempts)
            for job in jobs_of_task(task, place, attempt, tuple(models), self._tuner.seed)
        ]
        pairs = await asyncio.gather(*(self._attempt(job, work) for job in jobs))
        ended = [(one, output) for one, output in pairs if output is not None]
        scored = await self._scored(task, ended, compared=len(models) > 1)
        return [one for one, output in pairs if output is None] + scored

    async def _attempt(self, job: RolloutJob, work: Phase) -> tuple[Rollout, WorkflowOutput | None]:
        """Run the workflow once; None if it failed."""
        planned = plan_rollout(job, "")
        async with self._places:
            began = time.time()
            try:
                async with asyncio.timeout(self._tuner.timeout_seconds):
                    output = await self._workflow.run(
                        job.task.row, **self._address, model=job.candidate, seed=job.scenario["seed"]
                    )
            except Exception as error:  # noqa: BLE001  any exception of the agent is a failed rollout
                work.add(failed=1.0)
                state, values = RolloutState.FAILED, {"failure": describe_error(error)}
                return replace(planned, state=state, started_at=began, ended_at=time.time(), **values), None
        work.add(failed=0.0)
        found = replace(
            planned, state=RolloutState.ENDED, started_at=began, ended_at=time.time(), response=output.text,
            reward=output.reward, metrics=output.metrics,
        )  # fmt: skip
        return found, output

    async def _scored(
        self, task: Task, ended: Sequence[tuple[Rollout, WorkflowOutput]], *, compared: bool
    ) -> list[Rollout]:
        if self._judge is None:
            return [
                replace(one, score=one.reward, judge_failure=None if one.reward is not None else NO_JUDGE)
                for one, _ in ended
            ]
        members = [transcript_of(dict(task.row), output, (), name=one.id) for one, output in ended]
        ask = partial(judge_in_both_orders if compared else _judged, self._judge)
        if not members:
            return []
        async with self._judging:
            verdicts = (await asyncio.to_thread(ask, members)).verdicts
        return [
            replace(one, score=verdict.score, judge=verdict.judge, judge_failure=verdict.failure)
            for (one, _), verdict in zip(ended, verdicts, strict=True)
        ]


def _judged(judge: Judge, members: Sequence[Transcript]) -> GroupJudgement:
    return judge.judge(None, members)
