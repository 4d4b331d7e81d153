"""Workflows: the agent that is tuned, as a function `module:function` or as a program such as `python my_agent.py`.

`path/file.py:function` names a function as well, and `module:Class` a class whose objects can be called: one is made,
for all rollouts. A function, async or not, gets those of these that it names (one with **kwargs gets all of them):

    task           the task's row (dict)
    base_url       OpenAI-compatible base URL of this rollout alone; whatever is called there is its trajectory
    api_key        key for it
    model          name to ask for
    system_prompt  the prompt under trial, or None; the proxy swaps it in also where it is not used
    seed           a number of this attempt at this task, the same for every candidate of a comparison; None elsewhere

It returns anything, or `response`, `reward` and `metrics` as the keys of a mapping or the attributes of an object. A
program gets the same (`programs.py`). Promises: a parameter that nobody can fill is told when the workflow is loaded;
functions that are not async run in threads of their own, so that none of them holds up the others.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import shlex
import threading
from collections.abc import Callable, Mapping
from shutil import which
from typing import Any, Protocol

from trainer.entry_points import NotImportable, load
from trainer.errors import WorkflowError, WorkflowFailed
from trainer.tuning.outcome import Outcome, outcome_of
from trainer.tuning.programs import ProgramWorkflow

__all__ = ["PARAMETERS", "FunctionWorkflow", "Outcome", "Workflow", "load_workflow"]

PARAMETERS = ("task", "base_url", "api_key", "model", "system_prompt", "seed")
_ENTRY_POINT = re.compile(r"([A-Za-z_][\w.]*|.*\.py):[A-Za-z_][\w.]*")


class Workflow(Protocol):
    """Something that works on one task at a time, any number of them at once."""

    @property
    def name(self) -> str:
        """What it was given as."""

    async def run(
        self,
        task: Mapping[str, Any],
        *,
        base_url: str,
        api_key: str,
        model: str,
        system_prompt: str | None = None,
        seed: int | None = None,
    ) -> Outcome:
        """Work on one task. Raises whatever the agent raises, and WorkflowFailed."""


def load_workflow(spec: str) -> Workflow:
    """Return the workflow of `module:function` or of a command line. Raises WorkflowError."""
    if _ENTRY_POINT.fullmatch(spec.strip()):
        return FunctionWorkflow(spec.strip())
    try:
        words = shlex.split(spec)
    except ValueError as error:
        raise WorkflowError(f"workflow {spec!r}: {error}") from error
    if len(words) == 1 and "." in (name := words[0]) and name.replace(".", "").isidentifier() and not which(name):
        module, _, function = name.rpartition(".")
        meant = f"{name}:FUNCTION" if function == "py" else f"{module}:{function}"
        raise WorkflowError(f"workflow {spec!r}: a function is named with a colon: did you mean {meant}?")
    return ProgramWorkflow(spec, words)


class FunctionWorkflow:
    """A workflow that is a Python function."""

    def __init__(self, entry_point: str) -> None:
        self.name = entry_point
        try:
            self._function = _to_call(entry_point, load(entry_point)[0])
        except NotImportable as error:
            raise WorkflowError(f"workflow {entry_point}: {error}") from error
        self._by_place, self._by_name = _wanted(entry_point, self._function)
        self._is_async = inspect.iscoroutinefunction(self._function) or inspect.iscoroutinefunction(
            getattr(self._function, "__call__", None)  # noqa: B004  an object whose __call__ is async
        )

    async def run(
        self,
        task: Mapping[str, Any],
        *,
        base_url: str,
        api_key: str,
        model: str,
        system_prompt: str | None = None,
        seed: int | None = None,
    ) -> Outcome:
        """Call the function. Raises whatever it raises."""
        offered: dict[str, Any] = {"task": dict(task), "base_url": base_url, "api_key": api_key, "model": model}
        offered |= {"system_prompt": system_prompt, "seed": seed}
        places = [offered[name] for name in self._by_place]
        names = {name: offered[name] for name in self._by_name}
        try:
            return outcome_of(await self._call(places, names))
        except SystemExit as ended:  # in a program of its own that would be the exit code
            raise WorkflowFailed(f"it called sys.exit({ended.code!r})") from ended

    async def _call(self, places: list[Any], names: dict[str, Any]) -> Any:
        if self._is_async:
            return await self._function(*places, **names)
        answer = await _in_a_thread(lambda: self._function(*places, **names))
        return await answer if inspect.isawaitable(answer) else answer


def _to_call(entry_point: str, found: Callable[..., Any]) -> Callable[..., Any]:
    """Return what is called for each rollout: of a class, an object. Raises WorkflowError."""
    if isinstance(found, type):
        if not any("__call__" in vars(base) for base in found.__mro__):
            raise WorkflowError(
                f"workflow {entry_point}: its objects cannot be called; define __call__, or name a function"
            )
        try:
            found = found()
        except Exception as error:  # the user's own code
            raise WorkflowError(
                f"workflow {entry_point}: one object serves all rollouts, and cannot be made without arguments "
                f"({type(error).__name__}: {error}); name a function, or an object of the module"
            ) from error
    function = found if inspect.isroutine(found) else getattr(found, "__call__", found)  # noqa: B004  as below
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise WorkflowError(f"workflow {entry_point} yields: have it return its answer, once")
    return found


def _wanted(entry_point: str, function: Callable[..., Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the parameters to fill by place and by name. Raises WorkflowError."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError) as error:
        raise WorkflowError(f"workflow {entry_point}: its parameters cannot be told: {error}") from error
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        by_name = set(PARAMETERS)
    else:
        by_name = {parameter.name for parameter in parameters} & set(PARAMETERS)
    by_place = []
    for parameter in parameters:
        known = parameter.name in PARAMETERS
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY and known:
            by_place.append(parameter.name)
        elif not known and _must_be_given(parameter):
            raise WorkflowError(
                f"workflow {entry_point} takes {parameter.name!r}, which nobody gives it; it may take "
                f"{', '.join(PARAMETERS)}, and others that have a default"
            )
    return tuple(by_place), tuple(name for name in PARAMETERS if name in by_name and name not in by_place)


def _must_be_given(parameter: inspect.Parameter) -> bool:
    various = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and parameter.kind not in various


async def _in_a_thread(work: Callable[[], Any]) -> Any:
    """Run work in a thread of its own that nobody waits for at the end: a call that timed out may never return."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()

    def tell(value: Any, error: BaseException | None) -> None:
        if not answer.done():  # cancelled: nobody waits any more
            answer.set_exception(error) if error is not None else answer.set_result(value)

    def run() -> None:
        value: Any = None
        error: BaseException | None = None
        try:
            value = work()
        except (
            StopIteration,
            SystemExit,
            KeyboardInterrupt,
        ) as stopped:  # no future may hold them; Ctrl-C comes elsewhere
            error = WorkflowFailed(f"{type(stopped).__name__}: {stopped}")
        except BaseException as raised:  # noqa: BLE001  the agent's own error, which the caller gets
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, value, error)

    threading.Thread(target=run, name="workflow", daemon=True).start()
    return await answer
