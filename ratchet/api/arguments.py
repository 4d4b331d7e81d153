"""Arguments of the Python functions, as settings of a project and as functions of the caller."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratchet.api.tasks import Tasks
from ratchet.errors import InvalidArgument
from ratchet.settings.load_settings import load_agent
from ratchet.settings.project_settings import Settings
from ratchet.tuner.rollouts.workflow import FunctionWorkflow
from ratchet.tuning.context import setting_names

Function = Callable[..., Any]
AnyTasks = str | Path | Tasks
AnyWorkflow = str | Function
AnyJudge = str | Mapping[str, Any] | Function

_ARGUMENTS = (
    "workflow", "judge", "tasks", "attempts", "concurrency", "seed", "test_size", "agent", "base_model", "project",
    "config",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Arguments:
    """The settings of an agent, and the functions that are given in place of settings."""

    settings: Settings
    workflow: Function | None
    judge: Function | None


def read_arguments(
    given: Mapping[str, Any],
    own: Sequence[str] = (),
    named: Callable[[Mapping[str, Any]], Mapping[str, Any]] = setting_names,
) -> Arguments:
    """Read the arguments that all functions have, and a function's `own`, by name; None is not given.

    `named` returns them by the names of their settings. Raises SettingsError, InvalidArgument, WorkflowError.
    """
    values = {name: given[name] for name in (*_ARGUMENTS, *own)}
    config, values["model"] = values.pop("config"), values.pop("agent")
    workflow, judge = importable(values.pop("workflow")), judge_of(values.pop("judge"))
    if workflow is not None and not isinstance(workflow, str):
        FunctionWorkflow(workflow)  # raises WorkflowError
    values |= _source(values.pop("tasks"), values.pop("seed"), values.pop("test_size"))
    values |= {"workflow": workflow if isinstance(workflow, str) else None}
    values |= {"judge": None if callable(judge) else judge}
    content = given.get("settings") or {}
    if not isinstance(content, Mapping):
        raise InvalidArgument(f"settings is {content!r:.100}: give a mapping, such as {{'trainer': {{...}}}}")
    options = {tuple(path.split(".")): (f"{path.rpartition('.')[2]}=", value) for path, value in named(values).items()}
    settings = load_agent(None if config is None else Path(config), options, content)
    return Arguments(settings, workflow if callable(workflow) else None, judge if callable(judge) else None)


def split_of(tasks: AnyTasks | None, split: str | None) -> str:
    """Return the split to read: the given one, else that of `Tasks`, else test."""
    if split is None:
        return tasks.split if isinstance(tasks, Tasks) else "test"
    if isinstance(tasks, Tasks) and tasks.split != split:
        raise InvalidArgument(f"tasks is {tasks!r} and split is {split!r}: leave one of the two out")
    return split


def _source(tasks: AnyTasks | None, seed: int | None, test_size: float | None) -> dict[str, Any]:
    """Return source, share of held-out tasks and seed."""
    if not isinstance(tasks, (str, Path, Tasks, type(None))):
        raise InvalidArgument(f"tasks is {tasks!r:.100}: give a folder, a file, a hub name or `ratchet.Tasks(...)`")
    if not isinstance(tasks, Tasks):
        return {"tasks": None if tasks is None else str(tasks), "seed": seed, "test_size": test_size}
    if tasks.test_size is None:
        return {"tasks": tasks.source, "seed": seed, "test_size": test_size}
    if seed not in (None, tasks.seed) or test_size not in (None, tasks.test_size):
        raise InvalidArgument(
            f"{tasks!r} holds out {tasks.test_size:g} of its tasks: give seed and test_size there only"
        )
    return {"tasks": tasks.source, "seed": tasks.seed, "test_size": tasks.test_size}


def judge_of(given: Any) -> Any:
    """Return a judge as `importable` does. Raises InvalidArgument."""
    if not (given is None or callable(given) or isinstance(given, (str, Mapping))):
        raise InvalidArgument(
            f"judge is {given!r:.100}: give a function, `module:function`, or a mapping with the `kind` of a judge "
            "(docs/judges.md)"
        )
    return importable(given)


def importable(given: Any) -> Any:
    """Return a function as `module:function` if another process can import it; everything else unchanged."""
    module, name = getattr(given, "__module__", None), getattr(given, "__qualname__", "")
    if not callable(given) or module in (None, "__main__") or "<" in name or not name:
        return given
    try:
        found = operator.attrgetter(name)(sys.modules[str(module)])
    except (KeyError, AttributeError):
        return given
    return f"{module}:{name}" if found is given else given
