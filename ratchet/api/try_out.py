"""Tries a workflow and a judge on one task, without a project: nothing is started, recorded or trained.

The workflow calls any OpenAI-compatible server, and the judge gets the task and the response. Judges that read the
calls (`trajectory`, `tool_outcomes`) need `messages`, or a recorded trajectory: `ratchet judge try TRAJECTORY`.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from pydantic import ValidationError

from ratchet.api.arguments import AnyJudge, AnyWorkflow
from ratchet.api.event_loop import run_to_end
from ratchet.store.records import Trajectory, Transcript, Verdict, WorkflowResult
from ratchet.store.states import TrajectoryState
from ratchet.trainer.controller.judges import Judge
from ratchet.trainer.controller.judges.kinds.function import FunctionJudge
from ratchet.trainer.controller.judges.make_judge import make_judge
from ratchet.trainer.errors import JudgeError, TaskSetError, WorkflowError, WorkflowFailed
from ratchet.trainer.settings.judge_specs import FunctionSpec, read_spec
from ratchet.trainer.tasks import content_id
from ratchet.trainer.user_code.entry_points import ModelServer
from ratchet.trainer.user_code.judgement import Judgement
from ratchet.tuner.rollouts.runner import NO_KEY, describe_error
from ratchet.tuner.rollouts.workflow import FunctionWorkflow, Workflow, load_workflow
from ratchet.tuner.rollouts.workflow_output import WorkflowOutput, plain

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


def try_out(
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

    workflow  a function, sync or async, `module:function`, or a command line (docs/tuner.md)
    judge     a function, sync or async, `module:function`, or the mapping of a judge's kind (docs/judges.md); None:
              the workflow returns a reward
    task      the task's row
    base_url  an OpenAI-compatible server, such as `http://127.0.0.1:8000/v1`
    model     the model to request; None: the only one that the server lists (versions such as `policy@3` aside)

    Raises WorkflowError and JudgeError: one of the two cannot be loaded, or fails.
    """
    return run_to_end(
        try_out_async(
            workflow, judge, task, base_url=base_url, model=model, api_key=api_key, system_prompt=system_prompt,
            seed=seed,
        )
    )  # fmt: skip


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
    """Do what `try_out` does, in the running event loop."""
    row = _row(task)
    agent = load_workflow(workflow)
    key = api_key or NO_KEY
    made = None if judge is None else _open_judge(judge, ModelServer(base_url, key), has_messages=False)
    try:
        name = model or await served_model(agent, base_url, key)
        started_at = time.perf_counter()
        output = await _run(
            agent, row, base_url=base_url, api_key=key, model=name, system_prompt=system_prompt, seed=seed
        )
        seconds = time.perf_counter() - started_at
        judgement = _reward(output) if made is None else await asyncio.to_thread(_judge, made, row, output, ())
    finally:
        if made is not None:
            await asyncio.to_thread(made.close)
    return TryOut(output, judgement, seconds)


def try_judge(
    judge: AnyJudge,
    task: Mapping[str, Any] | str | None,
    response: Any,
    *,
    messages: Sequence[Mapping[str, Any]] = (),
    base_url: str | None = None,
    api_key: str | None = None,
) -> Judgement:
    """Judge one response. Also works in a notebook.

    judge     as for `try_out`
    task      the task's row, or its key
    response  what a workflow returned
    messages  the conversation, as chat messages, for a judge that reads the calls
    base_url  an OpenAI-compatible server, for a judge of AgentScope's tuner that takes `auxiliary_models`

    Raises JudgeError: the judge cannot be loaded, or fails.
    """
    return run_to_end(try_judge_async(judge, task, response, messages=messages, base_url=base_url, api_key=api_key))


async def try_judge_async(
    judge: AnyJudge,
    task: Mapping[str, Any] | str | None,
    response: Any,
    *,
    messages: Sequence[Mapping[str, Any]] = (),
    base_url: str | None = None,
    api_key: str | None = None,
) -> Judgement:
    """Do what `try_judge` does, beside the running event loop."""
    models = None if base_url is None else ModelServer(base_url, api_key)
    made = _open_judge(judge, models, has_messages=bool(messages))
    try:
        return await asyncio.to_thread(_judge, made, task, WorkflowOutput(plain(response)), messages)
    finally:
        await asyncio.to_thread(made.close)


def _row(task: Any) -> dict[str, Any]:
    if not isinstance(task, Mapping):
        raise TaskSetError(
            f"task is {task!r:.100}: give a task's row, a mapping such as {{'question': ...}}; `ratchet.Tasks(...)` "
            "yields rows"
        )
    return dict(task)


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


async def _run(workflow: Workflow, row: dict[str, Any], **given: Any) -> WorkflowOutput:
    try:
        return await workflow.run(row, **given)
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
    return _judgement(judge, verdict)


def _judgement(judge: Judge, verdict: Verdict) -> Judgement:
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
