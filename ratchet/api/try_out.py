"""A workflow, a judge or an evaluation without a project: nothing is started, recorded, stored or trained.

The workflow calls any OpenAI-compatible server, and the judge gets the task and the response. Judges that read the
calls (`trajectory`, `tool_outcomes`) need `messages`, or a recorded trajectory: `ratchet judge try TRAJECTORY`.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
from pydantic import ValidationError

from ratchet.api.arguments import AnyJudge, AnyWorkflow, Arguments, read_arguments
from ratchet.api.context import judge_of, model_server_of, task_set_of
from ratchet.api.runs import synchronous
from ratchet.errors import InvalidArgument
from ratchet.store.operation_records import Rollout
from ratchet.store.records import Trajectory, Transcript, Verdict, WorkflowResult
from ratchet.store.states import RolloutState, TrajectoryState
from ratchet.trainer.errors import JudgeError, TaskSetError, TuningError, WorkflowError, WorkflowFailed
from ratchet.trainer.judges.judgement import Judge
from ratchet.trainer.judges.kinds.combined import judge_in_both_orders
from ratchet.trainer.judges.kinds.function import FunctionJudge
from ratchet.trainer.judges.make_judge import make_judge
from ratchet.trainer.observability.progress import Phase, Progress, watch_for_command
from ratchet.trainer.settings.judge_specs import FunctionSpec, read_spec
from ratchet.trainer.statistics import ScoreRange
from ratchet.trainer.tasks import Task, content_id
from ratchet.trainer.user_code import Judgement, ModelServer
from ratchet.tuner.rollouts.prices import prices_of
from ratchet.tuner.rollouts.runner import NO_KEY, ROLLOUTS, RolloutJob, describe_error, plan_rollout
from ratchet.tuner.rollouts.scoring import NO_JUDGE, SCORES
from ratchet.tuner.rollouts.workflow import (
    FunctionWorkflow,
    Workflow,
    WorkflowInput,
    WorkflowOutput,
    load_workflow,
    plain,
)
from ratchet.tuner.selection import Selection, commonest, jobs_of_task, select
from ratchet.tuner.settings import TunerSettings
from ratchet.tuner.weights.trajectory_groups import ScoredTrajectory, TrajectoryGroup, check_groups

_MODELS_TIMEOUT = 10.0  # seconds


@dataclass(frozen=True, slots=True)
class TryOut:
    """The result of one attempt at one task.

    output     what the workflow returned
    judgement  what the judge returned; without a judge, the workflow's reward
    seconds    the time that the workflow took
    """

    output: WorkflowOutput
    judgement: Judgement
    seconds: float


async def try_out_async(
    workflow: AnyWorkflow,
    judge: AnyJudge | None,
    task: Mapping[str, Any],
    *,
    base_url: str,
    model: str | None = None,
    api_key: str | None = None,
    system_prompt: str | None = None,
    seed: int | None = None,
) -> TryOut:
    """Run a workflow and a judge on one task, as training would. Also works in a notebook.

    `try_out_async` runs an async workflow in the event loop that runs already.

    workflow  a function, sync or async, `module:function`, or a command line (docs/tuner.md)
    judge     a function, sync or async, `module:function`, or the mapping of a judge's kind (docs/judges.md); None:
              the workflow returns a reward
    task      the task's row
    base_url  an OpenAI-compatible server, such as `http://127.0.0.1:8000/v1`
    model     the model to request; None: the only one that the server lists (versions such as `policy@3` aside)

    Raises WorkflowError and JudgeError: one of the two cannot be loaded, or fails.
    """
    if not isinstance(task, Mapping):
        raise TaskSetError(
            f"task is {task!r:.100}: give a task's row, a mapping such as {{'question': ...}}; `ratchet.Tasks(...)` "
            "yields rows"
        )
    row, agent, key = dict(task), load_workflow(workflow), api_key or NO_KEY
    made = None if judge is None else _open_judge(judge, ModelServer(base_url, key), has_messages=False)
    try:
        name = model or await served_model(agent, base_url, key)
        started_at = time.perf_counter()
        output = await _run(agent, WorkflowInput(row, base_url, key, name, system_prompt, seed))
        seconds = time.perf_counter() - started_at
        judgement = _reward(output) if made is None else await asyncio.to_thread(_judge, made, row, output, ())
    finally:
        if made is not None:
            await asyncio.to_thread(made.close)
    return TryOut(output, judgement, seconds)


try_out = synchronous(try_out_async)


async def try_judge_async(
    judge: AnyJudge,
    task: Mapping[str, Any] | str | None,
    response: Any,
    *,
    messages: Sequence[Mapping[str, Any]] = (),
    base_url: str | None = None,
    api_key: str | None = None,
) -> Judgement:
    """Judge one response. Also works in a notebook; `try_judge_async` is for an event loop that runs already.

    judge     as for `try_out`
    task      the task's row, or its key
    response  what a workflow returned
    messages  the conversation, as chat messages, for a judge that reads the calls
    base_url  an OpenAI-compatible server, for a judge of AgentScope's tuner that takes `auxiliary_models`

    Raises JudgeError: the judge cannot be loaded, or fails.
    """
    models = None if base_url is None else ModelServer(base_url, api_key)
    made = _open_judge(judge, models, has_messages=bool(messages))
    try:
        return await asyncio.to_thread(_judge, made, task, WorkflowOutput(plain(response)), messages)
    finally:
        await asyncio.to_thread(made.close)


try_judge = synchronous(try_judge_async)


def _open_judge(judge: Any, models: ModelServer | None, *, has_messages: bool) -> Judge:
    if isinstance(judge, (str, Mapping)):
        try:
            spec = read_spec(judge)
            if isinstance(spec, FunctionSpec) and spec.base_url is None:
                made: Judge = FunctionJudge(spec.function, models=models)
            else:
                made = make_judge(spec, os.environ)
        except ValidationError as error:
            message = "; ".join(str(item["msg"]).removeprefix("Value error, ") for item in error.errors())
            raise JudgeError(f"judge {judge!r:.200}: {message}; see docs/judges.md") from error
    else:
        made = FunctionJudge(judge, models=models)
    if not has_messages:
        refuse_judge_of_calls(made)
    return made


def refuse_judge_of_calls(judge: Judge) -> None:
    """Raise JudgeError if a judge reads recorded calls: there are none."""
    if isinstance(judge, FunctionJudge) and judge.names_calls:
        raise JudgeError(
            f"judge {judge.name} reads `trajectory` or `tool_outcomes`, and no call is recorded here: use "
            "`ratchet.try_judge(..., messages=...)`, or `ratchet judge try TRAJECTORY` on a recorded one"
        )


async def served_model(workflow: Workflow, base_url: str, api_key: str) -> str:
    """Return the only model that a server lists, without its versions; "" if the workflow takes no name of a model."""
    if isinstance(workflow, FunctionWorkflow) and not workflow.takes("model"):
        return ""
    url = f"{base_url.rstrip('/')}/models"
    try:
        async with httpx.AsyncClient(timeout=_MODELS_TIMEOUT, headers={"authorization": f"Bearer {api_key}"}) as client:
            answer = await client.get(url)
        names = [str(one["id"]) for one in answer.raise_for_status().json()["data"]]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise WorkflowError(
            f"{url} names no model ({type(error).__name__}: {error}): correct base_url, or give model=NAME"
        ) from error
    agents = [name for name in names if "@" not in name or name.partition("@")[0] not in names]
    if len(agents) != 1:
        raise WorkflowError(f"{url} names {len(names)} models: give model=NAME ({', '.join(names[:10])})")
    return agents[0]


async def _run(workflow: Workflow, given: WorkflowInput) -> WorkflowOutput:
    try:
        return await workflow.run(given)
    except WorkflowFailed as error:
        raise WorkflowFailed(f"workflow {workflow.name}: {error}") from error
    except Exception as error:  # the agent's own code
        raise WorkflowFailed(f"workflow {workflow.name} failed with {describe_error(error)}") from error


def _reward(output: WorkflowOutput) -> Judgement:
    if output.reward is None:
        raise JudgeError("judge is None, and the workflow returned no reward: give a judge, or return WorkflowOutput")
    return Judgement(output.reward)


def _judge(
    judge: Judge, task: Mapping[str, Any] | str | None, output: WorkflowOutput, messages: Sequence[Mapping[str, Any]]
) -> Judgement:
    (verdict,) = judge.judge(None, [transcript_of(task, output, messages)]).verdicts
    if verdict.score is None:
        raise JudgeError(f"judge {judge.name}: {verdict.failure}")
    return Judgement(verdict.score, dict(verdict.components), verdict.explanation)


def transcript_of(
    task: Mapping[str, Any] | str | None,
    output: WorkflowOutput,
    messages: Sequence[Mapping[str, Any]],
    name: str = "try_out",
) -> Transcript:
    """Return what a judge gets for an output without recorded calls, under this trajectory id."""
    row = dict(task) if isinstance(task, Mapping) else None
    answer = output.response if isinstance(output.response, str) else json.dumps(output.response)
    run = Trajectory(
        id=name, alias="try_out", version=0, state=TrajectoryState.GROUPED, root_node="", tools_hash="",
        task=content_id(row) if row is not None else None if task is None else str(task), key_id=None, opened_at=0.0,
        last_active_at=0.0,
    )  # fmt: skip
    return Transcript(
        trajectory=run, calls=(), messages=tuple(messages) or ({"role": "assistant", "content": answer},), tools=(),
        row=row, returned=WorkflowResult(response=output.text, reward=output.reward),
    )  # fmt: skip


async def score_async(
    groups: Sequence[TrajectoryGroup],
    judge: AnyJudge | None = None,
    *,
    agent: str | None = None,
    project: str | None = None,
    config: str | Path | None = None,
) -> list[TrajectoryGroup]:
    """Return the groups with a judge's scores as rewards. Also in a notebook.

    For groups that were gathered without a judge, that another judge is to score, or that were imported: each
    trajectory has its `messages`, or a `response`. The members of a group are judged together. `score_async` is for an
    event loop that runs already.

    groups  what `gather` returned, or your own
    judge   as of `gather`; None: the project's

    The other arguments are those of `evaluate`; no settings file is needed. A failed rollout is not judged; a
    trajectory that the judge failed on has the reward None, and its `failure` says why. Raises JudgeError: the judge
    cannot be loaded; InvalidArgument: there is none; TuningError if it could score nothing.
    """
    given = locals()
    check_groups(groups)
    judged = [one for group in groups for one in group.trajectories if _is_judged(one)]
    read = read_arguments(given)
    with judge_of(read.settings, read.judge, model_server_of(read.settings)) as made:
        if made is None:
            raise InvalidArgument("no judge is set: give judge=, or set trainer.judge in ratchet.yaml")
        if not all(one.messages for one in judged):
            refuse_judge_of_calls(made)
        work = Progress(watch_for_command()).begin(SCORES, len(judged))
        places = asyncio.Semaphore(made.concurrency)
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(_scored(made, places, group, work)) for group in groups]
        finally:
            work.end()
    found = [task.result() for task in running]
    if all(one.reward is None for group in found for one in group.trajectories):
        failures = (one.failure for group in found for one in group.trajectories)
        raise TuningError(f"no trajectory could be scored: {commonest(failures) or 'none has messages or a response'}")
    return found


score = synchronous(score_async)


def _is_judged(one: ScoredTrajectory) -> bool:
    """Return whether there is something to judge; a rollout that failed has no response."""
    return one.response is not None or (bool(one.messages) and one.failure is None)


async def _scored(judge: Judge, places: asyncio.Semaphore, group: TrajectoryGroup, work: Phase) -> TrajectoryGroup:
    members = [
        transcript_of(
            group.scenario or None, WorkflowOutput(plain(one.response), reward=one.reward), one.messages,
            name=one.id or f"imported_{place}",
        )
        for place, one in enumerate(group.trajectories) if _is_judged(one)
    ]  # fmt: skip
    if not members:
        return group
    async with places:
        verdicts = (await asyncio.to_thread(judge.judge, None, members)).verdicts
    work.add(len(verdicts))
    rest = iter(verdicts)
    return replace(
        group, trajectories=tuple(_with(one, next(rest)) if _is_judged(one) else one for one in group.trajectories)
    )  # fmt: skip


def _with(one: ScoredTrajectory, verdict: Verdict) -> ScoredTrajectory:
    """Return a trajectory with a verdict; the judge's components are metrics."""
    metrics = {**one.metrics, **verdict.components}
    return replace(
        one, reward=verdict.score, explanation=verdict.explanation, failure=verdict.failure, metrics=metrics
    )  # fmt: skip


async def evaluate_directly(
    given: Arguments,
    models: tuple[str, ...],
    split: str,
    limit: int | None,
    score_range: tuple[float, float] | None,
    *,
    base_url: str,
    api_key: str | None,
) -> tuple[list[Rollout], Selection, dict[str, Mapping[str, Any]]]:
    """Run, judge and compare on any OpenAI-compatible server; return rollouts, comparison and rows by task.

    Raises what `ratchet.evaluate` does.
    """
    settings, tuner = given.settings, given.settings.tuner
    chosen = given.workflow or tuner.workflow
    if chosen is None or tuner.tasks is None:
        raise InvalidArgument(f"no {'workflow' if chosen is None else 'task set'} is set: give workflow= and tasks=")
    workflow = load_workflow(chosen)
    server = ModelServer(base_url, api_key or NO_KEY)
    models = models or (await served_model(workflow, base_url, api_key or NO_KEY),)
    tasks = list(task_set_of(settings, tuner.tasks).rows(split, limit))
    with judge_of(settings, given.judge, server) as judge:
        if judge is not None:
            refuse_judge_of_calls(judge)
        work = Progress(watch_for_command()).begin(ROLLOUTS, len(tasks) * len(models) * tuner.attempts)
        run = _DirectRun(workflow, judge, tuner, server, models, work)
        try:
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(run.of_task(*one)) for one in enumerate(tasks)]
        finally:
            work.end()
    made = [one for task in running for one in task.result()]
    selection = select(
        made, models, prices_of((), {}), failure_score=tuner.failure_score,
        score_range=ScoreRange(*score_range) if score_range else None,
    )  # fmt: skip
    return made, selection, {task.id: task.row for task in tasks}


@dataclass
class _DirectRun:
    """Rollouts at one server. The attempts at a task are judged together, as everywhere."""

    workflow: Workflow
    judge: Judge | None
    tuner: TunerSettings
    server: ModelServer
    models: tuple[str, ...]
    work: Phase

    def __post_init__(self) -> None:
        self._places = asyncio.Semaphore(self.tuner.concurrency)
        self._judging = asyncio.Semaphore(self.judge.concurrency if self.judge is not None else 1)

    async def of_task(self, place: int, task: Task) -> list[Rollout]:
        """Return the rollouts of a task, the `place`-th."""
        jobs = [
            job
            for attempt in range(self.tuner.attempts)
            for job in jobs_of_task(task, place, attempt, self.models, self.tuner.seed)
        ]
        pairs = await asyncio.gather(*(self._attempt(job) for job in jobs))
        ended = [(one, output) for one, output in pairs if output is not None]
        return [one for one, output in pairs if output is None] + await self._scored(task, ended)

    async def _attempt(self, job: RolloutJob) -> tuple[Rollout, WorkflowOutput | None]:
        """Run the workflow once; None if it failed."""
        output: WorkflowOutput | None = None
        values: dict[str, Any] = {}
        async with self._places:
            began = time.time()
            try:
                async with asyncio.timeout(self.tuner.timeout_seconds):
                    url, key, seed = self.server.base_url, self.server.api_key or NO_KEY, job.scenario["seed"]
                    output = await self.workflow.run(WorkflowInput(job.task.row, url, key, job.candidate, seed=seed))
            except Exception as error:  # noqa: BLE001  any exception of the agent is a failed rollout
                values = {"state": RolloutState.FAILED, "failure": describe_error(error)}
        if output is not None:
            values = {"state": RolloutState.ENDED, "response": output.text, "reward": output.reward}
            values["metrics"] = output.metrics
        self.work.add(failed=float(output is None))
        made = msgspec.structs.replace(plan_rollout(job, ""), started_at=began, ended_at=time.time(), **values)
        return made, output

    async def _scored(self, task: Task, ended: Sequence[tuple[Rollout, WorkflowOutput]]) -> list[Rollout]:
        change, judge = msgspec.structs.replace, self.judge
        if judge is None:
            return [
                change(one, score=one.reward, judge_failure=None if one.reward is not None else NO_JUDGE)
                for one, _ in ended
            ]
        members = [transcript_of(dict(task.row), output, (), name=one.id) for one, output in ended]
        if not members:
            return []
        async with self._judging:
            if len(self.models) > 1:
                judgement = await asyncio.to_thread(judge_in_both_orders, judge, members)
            else:
                judgement = await asyncio.to_thread(judge.judge, None, members)
        return [
            change(one, score=verdict.score, judge=verdict.judge, judge_failure=verdict.failure)
            for (one, _), verdict in zip(ended, judgement.verdicts, strict=True)
        ]
