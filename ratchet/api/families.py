"""Several task sets with an agent and a judge each, which train one adapter: `ratchet.tune(families=...)`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratchet.api.arguments import AnyJudge, AnyTasks, AnyWorkflow, Function, importable, judge_of
from ratchet.api.tasks import Tasks
from ratchet.errors import InvalidArgument
from ratchet.tuner.rollouts.workflow import FunctionWorkflow

_NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True, slots=True)
class Family:
    """A task set with its agent and its judge.

    tasks     as of `tune`; its test tasks are those of its split `test`
    workflow  as of `tune`
    judge     as of `tune`; None: the workflow returns a reward
    weight    tasks are drawn in proportion to it
    """

    tasks: AnyTasks
    workflow: AnyWorkflow
    judge: AnyJudge | None = None
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Families:
    """Families as options of the tuner, and the functions that are given in place of names."""

    sources: tuple[str, ...]  # NAME=SOURCE:WEIGHT
    workflow_names: tuple[str, ...]  # NAME=module:function
    workflows: Mapping[str, Function]
    judges: Mapping[str, Any]  # specifications and functions

    def functions(self, *, importable: bool) -> dict[str, Function | str]:
        """Return the judges that the trainer cannot import, and on request those that it can, by family."""
        served: dict[str, Function | str] = {name: one for name, one in self.judges.items() if callable(one)}
        if importable:
            served |= {name: one["function"] for name, one in self.judges.items() if is_function(one)}
        return served

    def judge(self, served: Mapping[str, Any]) -> dict[str, Any]:
        """Return the judge of all families. `served`: specifications in place of functions."""
        return {"kind": "by_family", "judges": {**self.judges, **served}}


def is_function(judge: Any) -> bool:
    """Return whether a specification names an importable function and nothing else."""
    return isinstance(judge, Mapping) and judge.keys() == {"kind", "function"} and judge["kind"] == "function"


def read_families(families: Mapping[str, Family]) -> Families:
    """Read `families=`. Raises InvalidArgument, WorkflowError."""
    if not families or not all(isinstance(one, Family) for one in families.values()):
        raise InvalidArgument("families: give a mapping of names to `ratchet.Family(tasks, workflow, judge)`")
    if wrong := [name for name in families if not _NAME.fullmatch(name)]:
        raise InvalidArgument(f"families: {wrong[0]!r} is no name: use letters, digits, _, . and -")
    workflows = {name: importable(one.workflow) for name, one in families.items()}
    functions = {name: one for name, one in workflows.items() if not isinstance(one, str)}
    for one in functions.values():
        FunctionWorkflow(one)  # raises WorkflowError
    return Families(
        sources=tuple(f"{name}={_source(name, one.tasks)}:{one.weight:g}" for name, one in families.items()),
        workflow_names=tuple(f"{name}={one}" for name, one in workflows.items() if isinstance(one, str)),
        workflows=functions,
        judges={name: _judge(one.judge) for name, one in families.items()},
    )


def _source(name: str, tasks: AnyTasks) -> str:
    if isinstance(tasks, Tasks):
        if tasks.test_size is not None:
            raise InvalidArgument(f"families: {name} holds out test tasks: give test_size= to tune, for all families")
        return tasks.source
    if not isinstance(tasks, (str, Path)):
        raise InvalidArgument(f"families: the tasks of {name} are {tasks!r:.100}: give a folder, a file or a hub name")
    return str(tasks)


def _judge(judge: AnyJudge | None) -> Any:
    """Return a specification, or a function that the trainer cannot import."""
    if judge is None:
        return {"kind": "workflow"}
    named = judge_of(judge)
    return {"kind": "function", "function": named} if isinstance(named, str) else named
