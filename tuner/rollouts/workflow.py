"""Workflows: the agent to tune, as a function `module:function` or as a program such as `python my_agent.py`.

`path/file.py:function` names a function too, and `module:Class` a class with `__call__`, of which one object serves all
rollouts. A function, async or not, receives those of these parameters that it declares (all of them with **kwargs):

    task           the task's row (dict)
    base_url       OpenAI-compatible base URL of this rollout; all calls there belong to its trajectory
    api_key        key for it
    model          model name to request
    system_prompt  the prompt under trial, or None; the proxy applies it even if the function does not
    seed           a number for this attempt at this task, equal for all candidates of a comparison; else None

A function that is written for AgentScope's tuner may take its chat models, too (plugins/agentscope).

It returns any value, or `response`, `reward` and `metrics` as keys of a mapping or attributes of an object. A program
gets the same (program_workflow.py). Guarantees: a parameter that is not in this list is an error when the workflow is
loaded; functions that are not async run in threads of their own and do not block each other.
"""

from __future__ import annotations

import asyncio
import inspect
import shlex
import threading
from collections.abc import Callable, Mapping
from shutil import which
from typing import Any, Protocol

from ratchet.trainer.errors import NotCallable, NotImportable, WorkflowError, WorkflowFailed
from ratchet.trainer.user_code.entry_points import (
    ENTRY_POINT,
    accepted_parameters,
    adapted,
    is_async,
    load,
    name_of,
    to_callable,
)
from ratchet.trainer.user_code.exit_guard import exit_failure
from ratchet.tuner.rollouts.program_workflow import ProgramWorkflow
from ratchet.tuner.rollouts.workflow_output import WorkflowOutput, outcome_of

__all__ = ["PARAMETERS", "FunctionWorkflow", "Workflow", "WorkflowOutput", "load_workflow"]

PARAMETERS = ("task", "base_url", "api_key", "model", "system_prompt", "seed")


class Workflow(Protocol):
    """Runs the agent on one task; any number of calls may run concurrently."""

    @property
    def name(self) -> str:
        """The specification that it was loaded from."""

    async def run(
        self,
        task: Mapping[str, Any],
        *,
        base_url: str,
        api_key: str,
        model: str,
        system_prompt: str | None = None,
        seed: int | None = None,
    ) -> WorkflowOutput:
        """Run one task. Raises the agent's exceptions and WorkflowFailed."""


def load_workflow(spec: str | Callable[..., Any]) -> Workflow:
    """Return the workflow of a function, of `module:function` or of a command line. Raises WorkflowError."""
    if not isinstance(spec, str):
        return FunctionWorkflow(spec)
    if ENTRY_POINT.fullmatch(spec.strip()):
        return FunctionWorkflow(spec.strip())
    try:
        words = shlex.split(spec)
    except ValueError as error:
        raise WorkflowError(f"workflow {spec!r}: {error}") from error
    if len(words) == 1 and "." in (name := words[0]) and name.replace(".", "").isidentifier() and not which(name):
        module, _, function = name.rpartition(".")
        meant = f"{name}:FUNCTION" if function == "py" else f"{module}:{function}"
        raise WorkflowError(f"workflow {spec!r}: name a function with a colon: did you mean {meant}?")
    return ProgramWorkflow(spec, words)


class FunctionWorkflow:
    """A workflow that is a Python function."""

    def __init__(self, function: str | Callable[..., Any]) -> None:
        self.name = function if isinstance(function, str) else name_of(function)
        try:
            found = to_callable(load(function)[0] if isinstance(function, str) else function)
            self._function = adapted("workflow", found, PARAMETERS)
            self._wanted = accepted_parameters(self._function, PARAMETERS)
        except NotImportable as error:
            raise WorkflowError(f"workflow {self.name}: {error}") from error
        except NotCallable as error:
            raise WorkflowError(f"workflow {self.name}{error}") from error
        self._is_async = is_async(self._function)

    def takes(self, parameter: str) -> bool:
        """Return whether the function takes a parameter."""
        return parameter in (*self._wanted.positional, *self._wanted.by_name)

    async def run(
        self,
        task: Mapping[str, Any],
        *,
        base_url: str,
        api_key: str,
        model: str,
        system_prompt: str | None = None,
        seed: int | None = None,
    ) -> WorkflowOutput:
        """Call the function. Raises its exceptions."""
        offered: dict[str, Any] = {"task": dict(task), "base_url": base_url, "api_key": api_key, "model": model}
        offered |= {"system_prompt": system_prompt, "seed": seed}
        try:
            return outcome_of(await self._call(offered))
        except SystemExit as ended:  # treated like a program's exit code
            raise WorkflowFailed(str(exit_failure(ended))) from ended

    async def _call(self, offered: Mapping[str, Any]) -> Any:
        if self._is_async:
            return await self._wanted.call(self._function, offered)
        answer = await _run_in_thread(lambda: self._wanted.call(self._function, offered))
        return await answer if inspect.isawaitable(answer) else answer


async def _run_in_thread(work: Callable[[], Any]) -> Any:
    """Run a function in a daemon thread: a call that timed out may never return."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Any] = loop.create_future()

    def deliver(value: Any, error: BaseException | None) -> None:
        if not answer.done():  # not cancelled
            answer.set_exception(error) if error is not None else answer.set_result(value)

    def run() -> None:
        value: Any = None
        error: BaseException | None = None
        try:
            value = work()
        except SystemExit as ended:
            error = WorkflowFailed(str(exit_failure(ended)))
        except (StopIteration, KeyboardInterrupt) as stopped:  # a future cannot hold these
            error = WorkflowFailed(f"{type(stopped).__name__}: {stopped}")
        except BaseException as raised:  # noqa: BLE001  the agent's error, passed to the caller
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, value, error)

    threading.Thread(target=run, name="workflow", daemon=True).start()
    return await answer
