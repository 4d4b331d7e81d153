"""Arguments of the Python functions: task sets, families of them, and settings and functions of the caller."""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ratchet.errors import InvalidArgument
from ratchet.settings.load_settings import load, load_agent
from ratchet.settings.project_settings import Settings
from ratchet.trainer.tasks import TRAIN, TaskSet, ending
from ratchet.tuner.rollouts.workflow import FunctionWorkflow
from ratchet.tuner.tasks import ImportedTasks

# The settings that arguments of all methods are: name -> path.
SETTINGS: Final[Mapping[str, str]] = {
    **{name: f"tuner.{name}" for name in ("tasks", "test_size", "workflow", "attempts", "concurrency", "seed")},
    **{"judge": "trainer.judge", "base_model": "base_model", "project": "project"},
}


class Tasks:
    """The tasks of one split. Iterating yields each different row once; nothing is held in memory.

    source     a folder, a file, a name of the Hugging Face hub, or a set of `ratchet tasks import`
    split      the split to read
    test_size  the share of the tasks to hold out as the split `test`, for a set that has one split only
    seed       draws another such share

    Raises TaskSetError: there is no such set, split or row.
    """

    def __init__(
        self, source: str | Path, *, split: str = TRAIN, test_size: float | None = None, seed: int = 0
    ) -> None:
        path = Path(source)
        is_file = bool(ending(path)) and path.is_file()  # needs no settings, which take longer to read
        found = TaskSet.open(source) if is_file else ImportedTasks(load().state.tasks).open(str(source))
        self.source, self.test_size, self.seed = str(source), test_size, seed
        self._set = found if test_size is None else found.split(1 - test_size, seed)
        self._set.check(split)
        self.split = split

    @property
    def name(self) -> str:
        """The name of the set."""
        return self._set.name

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the set's splits, train first."""
        return self._set.splits()

    def preview(self, n: int = 2) -> list[Mapping[str, Any]]:
        """Return the first rows."""
        return self._set.preview(self.split, n)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return (task.row for task in self._set.rows(self.split))

    def __repr__(self) -> str:
        return f"Tasks({self._set.source!r}, split={self.split!r})"


Function = Callable[..., Any]
AnyTasks = str | Path | Tasks
AnyWorkflow = str | Function
AnyJudge = str | Mapping[str, Any] | Function


@dataclass(frozen=True, slots=True)
class Arguments:
    """The settings of an agent, and the functions that are given in place of settings."""

    settings: Settings
    workflow: Function | None
    judge: Function | None


def read_arguments(
    given: Mapping[str, Any], names: Mapping[str, str] = SETTINGS, more: Mapping[str, Any] | None = None
) -> Arguments:
    """Read those of a function's arguments that are settings; None is not given.

    names  of arguments -> paths of settings
    more   other settings by their paths

    Raises SettingsError, InvalidArgument, WorkflowError.
    """
    workflow, judge = importable(given.get("workflow")), judge_of(given.get("judge"))
    if workflow is not None and not isinstance(workflow, str):
        FunctionWorkflow(workflow)  # raises WorkflowError
    values = {name: given.get(name) for name in names}
    values |= _source(given.get("tasks"), given.get("seed"), given.get("test_size"))
    values |= {"workflow": workflow if isinstance(workflow, str) else None}
    values |= {"judge": None if callable(judge) else judge}
    content = given.get("settings") or {}
    if not isinstance(content, Mapping):
        raise InvalidArgument(f"settings is {content!r:.100}: give a mapping, such as {{'trainer': {{...}}}}")
    paths = {names[name]: value for name, value in values.items()} | {"model": given.get("agent")} | dict(more or {})
    options = {tuple(path.split(".")): (f"{path.rpartition('.')[2]}=", value) for path, value in paths.items()}
    config = given.get("config")
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
    if not isinstance(tasks, Tasks) or tasks.test_size is None:
        source = tasks.source if isinstance(tasks, Tasks) else None if tasks is None else str(tasks)
        return {"tasks": source, "seed": seed, "test_size": test_size}
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
        served: dict[str, Function | str] = {}
        for name, one in self.judges.items():
            if callable(one):
                served[name] = one
            elif importable and one.keys() == {"kind", "function"} and one["kind"] == "function":
                served[name] = one["function"]
        return served

    def judge(self, served: Mapping[str, Any]) -> dict[str, Any]:
        """Return the judge of all families. `served`: specifications in place of functions."""
        return {"kind": "by_family", "judges": {**self.judges, **served}}


def read_families(families: Mapping[str, Family]) -> Families:
    """Read `families=`. Raises InvalidArgument, WorkflowError."""
    if not families or not all(isinstance(one, Family) for one in families.values()):
        raise InvalidArgument("families: give a mapping of names to `ratchet.Family(tasks, workflow, judge)`")
    if wrong := [name for name in families if not re.fullmatch(r"[\w.-]+", name)]:
        raise InvalidArgument(f"families: {wrong[0]!r} is no name: use letters, digits, _, . and -")
    workflows = {name: importable(one.workflow) for name, one in families.items()}
    functions = {name: one for name, one in workflows.items() if not isinstance(one, str)}
    for one in functions.values():
        FunctionWorkflow(one)  # raises WorkflowError
    return Families(
        sources=tuple(f"{name}={_family_source(name, one.tasks)}:{one.weight:g}" for name, one in families.items()),
        workflow_names=tuple(f"{name}={one}" for name, one in workflows.items() if isinstance(one, str)),
        workflows=functions,
        judges={name: _family_judge(one.judge) for name, one in families.items()},
    )


def _family_source(name: str, tasks: AnyTasks) -> str:
    if isinstance(tasks, Tasks):
        if tasks.test_size is not None:
            raise InvalidArgument(f"families: {name} holds out test tasks: give test_size= to tune, for all families")
        return tasks.source
    if not isinstance(tasks, (str, Path)):
        raise InvalidArgument(f"families: the tasks of {name} are {tasks!r:.100}: give a folder, a file or a hub name")
    return str(tasks)


def _family_judge(judge: AnyJudge | None) -> Any:
    """Return a specification, or a function that the trainer cannot import."""
    named = judge_of(judge)
    if named is None:
        return {"kind": "workflow"}
    return {"kind": "function", "function": named} if isinstance(named, str) else named
