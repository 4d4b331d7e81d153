"""Environments of the package `verifiers` (0.4): a taskset as a task set, an episode as a rollout with its reward.

`verifiers:NAME` and `verifiers:FILE.toml` are task sets. A row holds what the task itself holds (prompt, answer, ...),
and in the column `verifiers` the environment's description and the task's key, from which the workflow finds the task
again. Equal tasks have equal rows. The description (`Spec`) is what verifiers' own configuration files hold: `env`
(taskset, harness, runtime, limits), `select` (which tasks) and `sampling`. An agent of the environment whose runtime is
remote, as by default, runs in a local subprocess, unless the description names its runtime. Nothing is uploaded.

The workflow plays one episode with the environment's own harness, rewards and metrics. Every episode has its own
environment object, interception server and tool servers, which end with it. The model is reached at the rollout's base
URL like by any client. Errors of an episode, of an agent's trace or of scoring fail the rollout: they are never a
reward of 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import hashlib
import json
import os
import pkgutil
import re
import sys
import threading
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import verifiers.v1 as vf
from verifiers.v1 import tasksets
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.runtimes import SubprocessConfig, runtime_is_local
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from ratchet.trainer.errors import TaskSetError, TaskSetNotFound, WorkflowError, WorkflowFailed
from ratchet.trainer.tasks import TRAIN, Numbered, TaskSet, content_id
from ratchet.tuner.rollouts.workflow import WorkflowOutput

ROW = "verifiers"  # the column that holds the description and the task's key


@dataclass(frozen=True, slots=True)
class Spec:
    """An environment, the tasks to use, and sampling parameters, in verifiers' own terms."""

    env: Mapping[str, Any]
    select: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_source(cls, source: str) -> Spec:
        """Read the name of a taskset, or a configuration file of verifiers. Raises TaskSetNotFound."""
        if not source.endswith(".toml"):
            return cls({"taskset": {"id": source}})
        try:
            given = tomllib.loads(Path(source).read_text())
        except (OSError, ValueError) as error:
            raise TaskSetNotFound(f"verifiers configuration {source}: {type(error).__name__}: {error}") from error
        if not isinstance(given.get("env"), dict):
            raise TaskSetNotFound(f"verifiers configuration {source}: it has no table [env] with taskset.id")
        return cls(given["env"], given.get("select", {}), given.get("sampling", {}))

    @property
    def taskset(self) -> str:
        """The taskset's id."""
        return str((self.env.get("taskset") or {}).get("id") or "")

    def row(self) -> dict[str, Any]:
        """Return the description as it stands in a task's row."""
        return {"env": self.env} | {
            name: part for name, part in (("select", self.select), ("sampling", self.sampling)) if part
        }

    def load(self) -> Any:
        """Return a new environment (`vf.Env`), whose agents are local. Raises TaskSetError, TaskSetNotFound."""
        if str(Path.cwd()) not in sys.path:  # the `ratchet` script does not put the working folder on the path
            sys.path.insert(0, str(Path.cwd()))
        try:
            with contextlib.redirect_stdout(sys.stderr):
                return load_environment(self._local(resolve_env_config(copy.deepcopy(dict(self.env)))))
        except ModuleNotFoundError as error:
            raise TaskSetNotFound(
                f"verifiers environment {self.taskset}: {error}; verifiers itself has {_built_in()}; install "
                f"the taskset's package, or run where {self.taskset.replace('-', '_')}.py can be imported"
            ) from error
        except (Exception, SystemExit) as error:  # code of the environment
            raise TaskSetError(f"verifiers environment {self.taskset}: {type(error).__name__}: {error}") from error

    def _local(self, config: Any) -> Any:
        local = {
            name: agent.model_copy(update={"runtime": SubprocessConfig()})
            for name, agent in agent_config_fields(config).items()
            if not runtime_is_local(agent.runtime) and "runtime" not in (self.env.get(name) or {})
        }
        return config.model_copy(update=local)


class TasksByKey:
    """The tasks of a taskset. They are read once, and only as far as needed; any thread may ask."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._lock = threading.Lock()
        self._read: dict[str, Any] = {}
        self._rest = tasks_of(spec)

    def find(self, key: str) -> Any:
        """Return a task (`vf.Task`). Raises TaskSetError if the taskset no longer has it."""
        with self._lock:
            while key not in self._read:
                try:
                    task = next(self._rest, None)
                except TaskSetError:
                    self._rest = tasks_of(self._spec)  # a generator that raised yields nothing more
                    raise
                if task is None:
                    raise TaskSetError(
                        f"verifiers taskset {self._spec.taskset} has no task {key} any more: it changed since its "
                        "import; import it again with --replace"
                    )
                self._read[content_id(content_of(task))] = task
            return self._read[key]


def tasks_of(spec: Spec) -> Iterator[Any]:
    """Yield the tasks (`vf.Task`). Raises TaskSetError, TaskSetNotFound."""
    taskset = spec.load().taskset
    try:
        view = taskset.select(vf.SelectConfig.model_validate(spec.select))
        if not view.bounded:
            raise TaskSetError(
                f"verifiers taskset {spec.taskset} is infinite: use a configuration file with `select.limit`, as "
                "verifiers:FILE.toml"
            )
        tasks = iter(view)
        while True:
            with contextlib.redirect_stdout(sys.stderr):
                task = next(tasks, None)
            if task is None:
                return
            yield task
    except TaskSetError:
        raise
    except (Exception, SystemExit) as error:  # code of the taskset
        raise TaskSetError(f"verifiers taskset {spec.taskset}: {type(error).__name__}: {error}") from error


def content_of(task: Any) -> dict[str, Any]:
    """Return what the task itself holds, without its place in the taskset. Its hash is the task's key."""
    content: dict[str, Any] = task.data.model_dump(mode="json", exclude_defaults=True, exclude={"idx"})
    return content


def _built_in() -> str:
    return ", ".join(sorted(one.name for one in pkgutil.iter_modules(tasksets.__path__)))


@functools.lru_cache(maxsize=64)
def _tasks_by_key(row: str) -> TasksByKey:
    return TasksByKey(Spec(**json.loads(row)))


def find_task(spec: Spec, key: str) -> Any:
    """Return the task with this key. Reads the taskset at the first call for this description."""
    return _tasks_by_key(json.dumps(spec.row(), sort_keys=True)).find(key)


def open_taskset(source: str) -> TaskSet:
    """Open a taskset by its name or by a configuration file of verifiers. Raises TaskSetError."""
    spec = Spec.of_source(source)
    spec.load()  # an unknown name is reported now
    name = Path(source).stem if source.endswith(".toml") else source.rsplit("/", 1)[-1].partition("@")[0]

    def rows() -> Iterator[Numbered]:
        return ((number, _row(spec, task)) for number, task in enumerate(tasks_of(spec), 1))

    return TaskSet.of_rows(re.sub(r"[^\w.-]", "_", name), f"verifiers:{source}", {TRAIN: rows})


def _row(spec: Spec, task: Any) -> dict[str, Any]:
    content = content_of(task)
    return content | {ROW: spec.row() | {"key": content_id(content)}}


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


def main() -> None:
    """Run one task as a program: row on stdin, server in OPENAI_*, output on stdout. Exits with 1 on failure."""
    row = json.load(sys.stdin)
    url, key, model = (os.environ[name] for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL"))
    with contextlib.redirect_stdout(sys.stderr):
        output = asyncio.run(workflow(row, base_url=url, api_key=key, model=model))
    json.dump(asdict(output), sys.stdout)
