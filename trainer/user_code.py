"""Users' code: entry points, plug-ins, a judge's result, and exits that must not end the process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import importlib.util
import inspect
import operator
import re
import sys
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeVar

from ratchet.errors import RatchetError
from ratchet.store.errors import install_hint, plugin_hint
from ratchet.trainer.errors import NotCallable, NotImportable, PluginError, TrainerError

# What a judge returns for one trajectory, as a typed record; numbers and mappings do as well (docs/judges.md).


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a judge returns.

    score        a finite number of at most 1e9; higher is better
    components   name -> number, stored beside the score; at most 1,000
    explanation  why, for people; 20,000 characters are stored
    """

    score: float
    components: Mapping[str, float] = field(default_factory=dict)
    explanation: str = ""


# Turns `sys.exit` in user code into a failure of that code; the process continues.
#
# asyncio lets the SystemExit of a task end the event loop, so one agent's argparse would stop all others. The task
# factory `guarded_task` raises TrainerError instead. KeyboardInterrupt is not changed.

_T = TypeVar("_T")


def exit_failure(error: SystemExit) -> TrainerError:
    return TrainerError(f"it called sys.exit({error.code!r}); have it return or raise an exception")


def guarded_task(
    loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, _T] | Generator[Any, None, _T], **options: Any
) -> asyncio.Task[_T]:
    """Create a task whose SystemExit becomes a TrainerError; for `loop.set_task_factory`."""
    return asyncio.Task(_Guarded(coro), loop=loop, **options)


class _Guarded(Coroutine[Any, Any, _T]):
    """A coroutine that raises TrainerError if the inner one raises SystemExit.

    It is no `async def`, because then a task cancelled before its first step would never await the inner one.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.__qualname__ = getattr(inner, "__qualname__", type(inner).__qualname__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # anyio looks at `cr_running` and others before it cancels a task

    def __await__(self) -> Generator[Any, Any, _T]:
        raise TypeError("only a task can run this coroutine")

    def send(self, value: Any) -> Any:
        try:
            return self._inner.send(value)
        except SystemExit as error:
            raise exit_failure(error) from error

    def throw(self, *exception: Any) -> Any:
        try:
            return self._inner.throw(*exception)
        except SystemExit as error:
            raise exit_failure(error) from error

    def close(self) -> None:
        self._inner.close()


# Imports user functions, named as `module:function` or `path/file.py:function`, and what they are called with.
#
# Modules are imported from the working folder or the installed packages; a file can import its neighbors. User code
# runs with the rights of this process. Errors of its import, including `sys.exit`, become one sentence; its output goes
# to standard error.

_CHAT_MODEL = re.compile(r"\bChatModelBase\b|\bagentscope\.model\b")  # in the annotation of a parameter `model`
ENTRY_POINT = re.compile(r"([A-Za-z_][\w.]*|.*\.py):[A-Za-z_][\w.]*")


@dataclass(frozen=True, slots=True)
class AcceptedParameters:
    """The available values that a function accepts, by position and by name."""

    positional: tuple[str, ...]
    by_name: tuple[str, ...]

    def call(self, function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
        positional = [values[name] for name in self.positional]
        return function(*positional, **{name: values[name] for name in self.by_name})


@dataclass(frozen=True, slots=True)
class ModelServer:
    """An OpenAI-compatible server whose models a function may call: `base_url` with /v1, `api_key` None if none."""

    base_url: str
    api_key: str | None


class ResponseText(str):
    """The text of a response, which judges may also read as they read AgentScope's messages."""

    __slots__ = ()

    def get_text_content(self, separator: str = "\n") -> str:
        return str(self)


def adapted(kind: str, function: Callable[..., Any], parameters: Sequence[str], *given: Any) -> Callable[..., Any]:
    """Return a "workflow" or "judge" that takes names of `parameters`: any function but those for AgentScope's tuner.

    The plug-in `agentscope` calls these. `given`: of a judge, the server of its models. Raises NotCallable.
    """
    declared = _declared(function)
    extra = [declared[name] for name in ("auxiliary_models", "logger") if name in declared]
    takes_model = bool(_CHAT_MODEL.search(str(declared.get("model"))))
    if not takes_model and not extra:
        return function
    if "agentscope" not in plugin_names(FUNCTION_ADAPTERS):
        if takes_model or any(map(_is_required, extra)):
            remedy = missing_plugin_remedy(FUNCTION_ADAPTERS, "agentscope")
            raise NotCallable(f" takes what AgentScope's tuner gives: {remedy}")
        return function
    adapter = load_plugin(FUNCTION_ADAPTERS, "agentscope")
    made: Callable[..., Any] = getattr(adapter, f"adapted_{kind}")(function, parameters, *given)
    return made


def to_callable(target: Callable[..., Any]) -> Callable[..., Any]:
    """Return the callable; for a class, one instance of it. Raises NotCallable."""
    if not callable(target):
        raise NotCallable(" is no function: give a function, or name one as module:function")
    if isinstance(target, type):
        if not any("__call__" in vars(base) for base in target.__mro__):
            raise NotCallable(": its instances are not callable; define __call__, or name a function")
        try:
            target = target()
        except (Exception, SystemExit) as error:  # the user's own code
            raise NotCallable(
                f": it cannot be instantiated without arguments ({type(error).__name__}: {error}); "
                "name a function, or an object of the module"
            ) from error
    function = target if inspect.isroutine(target) else getattr(target, "__call__", target)  # noqa: B004  of an object
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise NotCallable(" is a generator function: return one result instead of yielding")
    return target


def is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  an object whose __call__ is async
    )


def accepted_parameters(function: Callable[..., Any], available: Sequence[str]) -> AcceptedParameters:
    """Return the available parameters that a function accepts; **kwargs accepts all. Raises NotCallable.

    Arguments bound by functools.partial stay bound.
    """
    parameters = _declared(function).values()
    kinds = {parameter.kind for parameter in parameters}
    named = {one.name for one in parameters if one.kind is not inspect.Parameter.VAR_POSITIONAL}
    by_name = set(available) if inspect.Parameter.VAR_KEYWORD in kinds else named & set(available)
    if isinstance(function, functools.partial):
        by_name -= set(function.keywords)
    positional = []
    for parameter in parameters:
        is_available = parameter.name in available
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY and is_available:
            positional.append(parameter.name)
        elif not is_available and _is_required(parameter):
            raise NotCallable(
                f" requires the parameter {parameter.name!r}; it can use {', '.join(available)}, and parameters with a "
                "default"
            )
    return AcceptedParameters(
        tuple(positional), tuple(name for name in available if name in by_name and name not in positional)
    )


def _declared(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (ValueError, TypeError) as error:
        raise NotCallable(f": its parameters are unknown: {error}") from error


def _is_required(parameter: inspect.Parameter) -> bool:
    various = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and parameter.kind not in various


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function that was given as an object: `module:function`."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}" if callable(function) else f"{function!r:.100}"


def load(entry_point: str) -> tuple[Callable[..., Any], ModuleType]:
    """Return the function or other callable, and its module. Raises NotImportable."""
    module_name, _, function_name = entry_point.rpartition(":")
    here = str(Path.cwd())
    try:
        with contextlib.redirect_stdout(sys.stderr):
            module = _of_file(Path(module_name)) if module_name.endswith(".py") else _named(module_name, here)
        function = operator.attrgetter(function_name)(module)
    except SystemExit as error:  # a script without `if __name__ == "__main__"`
        raise NotImportable(f"while it is imported {exit_failure(error)}") from error
    except RatchetError as error:  # its message names the remedy
        raise NotImportable(str(error)) from error
    except Exception as error:  # the import of user code may raise any exception
        problem = f"{type(error).__name__}: {error}"
        how = "module:function or path/file.py:function"
        raise NotImportable(f"{problem}; give it as {how}, importable from {here}") from error
    if not callable(function):
        raise NotImportable("that is not callable")
    return function, module


def _named(name: str, here: str) -> ModuleType:
    if here not in sys.path:  # the `ratchet` script does not put the working folder on the path; `python -m` does
        sys.path.insert(0, here)
    return importlib.import_module(name)


def _of_file(file: Path) -> ModuleType:
    """Return the module of a file; each file is imported once."""
    path = file.resolve()
    for name in (path.stem, str(path)):
        loaded = sys.modules.get(name)
        if loaded is not None and getattr(loaded, "__file__", None) == str(path):
            return loaded
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = importlib.util.module_from_spec(spec)
    name = path.stem if path.stem not in sys.modules else str(path)  # math.py must not replace the module `math`
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


# Plug-ins: features that an installed distribution registers as Python entry points.
#
# The groups are the constants below; what each expects: docs/plugins.md. Ratchet's own plug-ins (plugins/) are
# distributions that are registered and loaded the same way.

JUDGES: Final = "ratchet.judges"
PROMPT_OPTIMIZERS: Final = "ratchet.prompt_optimizers"
EVALUATIONS: Final = "ratchet.evaluations"  # commands below `ratchet eval`
TUNE_COMMANDS: Final = "ratchet.tune_commands"
MONITORS: Final = "ratchet.monitors"
MODEL_CARDS: Final = "ratchet.model_cards"
TASK_SOURCES: Final = "ratchet.task_sources"
OBJECTIVE_PLUGINS: Final = "ratchet.objectives"
ADVANTAGE_ESTIMATORS: Final = "ratchet.advantage_estimators"
FUNCTION_ADAPTERS: Final = "ratchet.function_adapters"
# What Ratchet's own plug-ins register: name -> folder of plugins/, by group.
OWN_PLUGINS: Final[dict[str, dict[str, str]]] = {
    JUDGES: {"behavior": "judges", "next_state": "judges", "openjudge": "openjudge"},
    MODEL_CARDS: {"readme": "model-card"},
    MONITORS: {"tensorboard": "tensorboard", "wandb": "wandb"},
    OBJECTIVE_PLUGINS: {"dpo": "preference", "apo_zero_unpaired": "preference"},
    EVALUATIONS: {"bfcl": "bfcl"},
    FUNCTION_ADAPTERS: {"agentscope": "agentscope"},
    PROMPT_OPTIMIZERS: {"mipro": "mipro"},
    TASK_SOURCES: {"verifiers": "verifiers"},
    TUNE_COMMANDS: {"lessons": "lessons"},
}


def plugin_names(group: str) -> list[str]:
    return sorted({point.name for point in entry_points(group=group)})


def load_plugin(group: str, name: str) -> Any:
    """Import a plug-in and return the object that its entry point names. Raises PluginError."""
    points = list({point.value: point for point in entry_points(group=group, name=name)}.values())
    if not points:
        installed = ", ".join(plugin_names(group)) or "none"
        raise PluginError(
            f"no plug-in {name!r} in the entry-point group {group} (installed: {installed}): "
            f"{missing_plugin_remedy(group, name)}"
        )
    if len(points) > 1:
        owners = " and ".join(sorted(_distribution(point) for point in points))
        raise PluginError(f"plug-in {name!r} of the group {group} is registered by {owners}: uninstall one of them")
    point = points[0]
    try:
        return point.load()
    except (Exception, SystemExit) as error:  # a plug-in's import may fail in any way
        raise PluginError(
            f"plug-in {name!r} of the group {group} ({point.value.partition('[')[0].strip()}, from "
            f"{_distribution(point)}) cannot be imported: "
            f"{type(error).__name__}: {error}; {_remedy(point, error)}"
        ) from error


def missing_plugin_remedy(group: str, name: str) -> str:
    """Return the clause that says what to do about a plug-in that is not installed."""
    if folder := OWN_PLUGINS.get(group, {}).get(name):
        return plugin_hint(folder)
    return "correct the name, or install the distribution that registers it into this Python environment"


def _distribution(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "an unknown distribution"


def _remedy(point: EntryPoint, error: BaseException) -> str:
    name = point.dist.name if point.dist is not None else "its distribution"
    _, bracket, extra = point.value.partition("[")  # EntryPoint.extras splits names at hyphens
    if bracket and name == "ratchet-rl":
        return install_hint(extra.removesuffix("]"))
    if bracket:
        return f"install the extra: pip install '{name}[{extra}'"
    if isinstance(error, ModuleNotFoundError) and name.startswith("ratchet-rl-"):
        return plugin_hint(name.removeprefix("ratchet-rl-"))
    if isinstance(error, ModuleNotFoundError):
        return f"install the missing module, or update {name}"
    return f"update {name}, or report the error to its authors"
