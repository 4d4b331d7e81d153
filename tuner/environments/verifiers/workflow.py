"""The workflow of all verifiers environments: one episode, with the environment's own harness, rewards and metrics.

Every episode has its own environment object, interception server and tool servers, which end with it. The model is
reached at the rollout's base URL like by any client. Errors of an episode, of an agent's trace or of scoring fail the
rollout: they are never a reward of 0. Requires a task of `ratchet tasks import verifiers:NAME`.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from statistics import fmean
from typing import Any

import verifiers.v1 as vf

from ratchet.trainer.errors import WorkflowError, WorkflowFailed
from ratchet.tuner.environments.verifiers.environment import ROW, Spec, find_task
from ratchet.tuner.rollouts.workflow_output import WorkflowOutput


async def workflow(task: Mapping[str, Any], *, base_url: str, api_key: str, model: str) -> WorkflowOutput:
    """Play one episode. Raises WorkflowError and TaskSetError (wrong task), WorkflowFailed (the episode failed)."""
    spec, key = _described(task)
    environment = spec.load()
    found = await asyncio.to_thread(find_task, spec, key)
    context = vf.ModelContext(
        model=model,
        client=vf.EvalClientConfig(base_url=base_url, api_key_var=_variable(api_key)),
        sampling=vf.SamplingConfig.model_validate(spec.sampling),
    )
    async with environment.serving():
        episode = await environment.run_episode(found, context)
    return _output(episode, is_complete=environment.complete(episode))


def _described(task: Mapping[str, Any]) -> tuple[Spec, str]:
    given = task.get(ROW)
    if isinstance(given, Mapping) and {"env", "key"} <= given.keys():
        return Spec(given["env"], given.get("select", {}), given.get("sampling", {})), given["key"]
    raise WorkflowError(
        f"the task has no column {ROW!r} with `env` and `key`: use a task set of `ratchet tasks import {ROW}:NAME`"
    )


def _variable(api_key: str) -> str:
    """Put a key into the environment variable of its own that verifiers' client is given, and return the name.

    Verifiers passes no variable whose name has API_KEY on to the programs of a harness.
    """
    name = f"RATCHET_VERIFIERS_API_KEY_{hashlib.sha256(api_key.encode()).hexdigest()[:12]}"
    os.environ[name] = api_key
    return name


def _output(episode: Any, *, is_complete: bool) -> WorkflowOutput:
    """Return reward and metrics of the trained agents: those that the environment does not mark as untrainable."""
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    if failure := _failure(episode, traces, is_complete):
        raise WorkflowFailed(failure)
    rewards = [trace.reward for trace in traces if trace.rewards]
    return WorkflowOutput(
        response=traces[-1].last_reply,
        reward=fmean(rewards) if rewards else None,
        metrics=_means((name, value) for trace in traces for name, value in _numbers(trace)),
    )


def _failure(episode: Any, traces: list[Any], is_complete: bool) -> str | None:
    if not is_complete or not traces:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        stopped = [trace.stop_condition for trace in episode.traces]
        return _described_error(errors) or f"the episode is incomplete, without an error: {stopped or 'no agent ran'}"
    broken = [error for trace in traces if not trace.ok for error in trace.errors]
    unscored = [name for trace in traces for name, reward in trace.rewards.items() if reward is None]
    return _described_error(broken) or (f"no score of {', '.join(unscored)}" if unscored else None)


def _described_error(errors: list[Any]) -> str | None:
    return f"{errors[0].type}: {errors[0].message}" if errors else None


def _numbers(trace: Any) -> Iterator[tuple[str, float]]:
    yield from ((name, value) for name, value in trace.metrics.items() if value is not None)
    yield from ((name, reward.score) for name, reward in trace.rewards.items())


def _means(numbers: Iterable[tuple[str, float]]) -> dict[str, float]:
    found = defaultdict(list)
    for name, value in numbers:
        found[name].append(value)
    return {name: fmean(values) for name, values in found.items()}
