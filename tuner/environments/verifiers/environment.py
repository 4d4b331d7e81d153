"""One environment of the package `verifiers`, as the rows of its tasks describe it, and its tasks by their keys.

The description (`Spec`) is what verifiers' own configuration files hold: `env` (taskset, harness, runtime, limits),
`select` (which tasks) and `sampling`. An agent of the environment whose runtime is remote, as by default, runs in a
local subprocess, unless the description names its runtime. Nothing is uploaded.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import pkgutil
import sys
import threading
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1 import tasksets
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.runtimes import SubprocessConfig, runtime_is_local
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from ratchet.trainer.errors import TaskSetError, TaskSetNotFound
from ratchet.trainer.tasks.task_set import content_id

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
