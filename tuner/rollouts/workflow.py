"""Workflows: the agent to tune, as a function `module:function` or as a program such as `python my_agent.py`.

`path/file.py:function` names a function too, and `module:Class` a class with `__call__`, of which one object serves all
rollouts. A function, async or not, receives the fields of `WorkflowInput` that are its parameters (all with **kwargs).

A function that is written for AgentScope's tuner may take its chat models, too (plugins/agentscope).

It returns any value, or `response`, `reward` and `metrics` as keys of a mapping or attributes of an object. A program
gets the same (ProgramWorkflow). Guarantees: a parameter of another name is an error when the workflow is loaded;
functions that are not async run in threads of their own and do not block each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import json
import math
import os
import shlex
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from shutil import which
from typing import IO, Any, Protocol

from ratchet.store.statistics import SCORE_RANGE, number_of
from ratchet.trainer.errors import NotCallable, NotImportable, WorkflowError, WorkflowFailed
from ratchet.trainer.user_code import (
    ENTRY_POINT,
    accepted_parameters,
    adapted,
    exit_failure,
    is_async,
    load,
    name_of,
    to_callable,
)


@dataclasses.dataclass(frozen=True, slots=True)
class WorkflowInput:
    """What a workflow gets for one rollout.

    task           the task's row
    base_url       OpenAI-compatible base URL of this rollout; all calls there belong to its trajectory
    api_key        key for it
    model          model name to request
    system_prompt  the prompt under trial, or None; the proxy applies it even if the function does not
    seed           a number for this attempt at this task, equal for all candidates of a comparison; else None
    """

    task: Mapping[str, Any]
    base_url: str
    api_key: str
    model: str
    system_prompt: str | None = None
    seed: int | None = None


PARAMETERS = tuple(one.name for one in dataclasses.fields(WorkflowInput))


class Workflow(Protocol):
    """Runs the agent on one task; any number of calls may run concurrently."""

    @property
    def name(self) -> str:
        """The specification that it was loaded from."""

    async def run(self, given: WorkflowInput) -> WorkflowOutput:
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
        return parameter in (*self._wanted.positional, *self._wanted.by_name)

    async def run(self, given: WorkflowInput) -> WorkflowOutput:
        offered = {name: getattr(given, name) for name in PARAMETERS} | {"task": dict(given.task)}
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


_MAX_STDOUT_BYTES = 16 * 2**20
_MAX_STDERR_BYTES = 2**30
_MAX_STDERR_CHARS = 2000  # in an error
_CHECK_SECONDS = 0.1  # between two looks at how much a program has written
_PARTS = frozenset({"response", "reward", "metrics"})


class ProgramWorkflow:
    """A workflow that is a command line, run once per task: the task as JSON on stdin, the answer on stdout.

    The program gets OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL, in prompt tuning RATCHET_SYSTEM_PROMPT, and in a
    comparison RATCHET_SEED. Other RATCHET_* variables, which may hold secrets, are removed. If stdout is one JSON
    object of `response`, `reward` and `metrics`, these are used; otherwise stdout is the response. A non-zero exit code
    is a failure, reported with the end of stderr. Guarantee: the program and its process group end with the rollout.
    """

    def __init__(self, name: str, words: Sequence[str]) -> None:
        if not words or shutil.which(words[0]) is None:
            raise WorkflowError(
                f"workflow {name!r}: no such program: {words[0] if words else ''!r}; give module:function, or a "
                "command line such as 'python my_agent.py'"
            )
        self.name = name
        self._words = tuple(words)

    async def run(self, given: WorkflowInput) -> WorkflowOutput:
        environ = environment(os.environ)
        environ |= {"OPENAI_BASE_URL": given.base_url, "OPENAI_API_KEY": given.api_key, "OPENAI_MODEL": given.model}
        if given.system_prompt is not None:
            environ["RATCHET_SYSTEM_PROMPT"] = given.system_prompt
        if given.seed is not None:
            environ["RATCHET_SEED"] = str(given.seed)
        output, errors, status = await _run_program(self._words, environ, json.dumps(given.task).encode())
        if status:
            message = errors.decode(errors="replace").strip()[-_MAX_STDERR_CHARS:]
            raise WorkflowFailed(f"exit code {status}: {message or 'nothing on stderr'}")
        return _read(output)


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables for a program."""
    return {name: value for name, value in environ.items() if not name.startswith("RATCHET_")}


async def _run_program(words: Sequence[str], environ: Mapping[str, str], task: bytes) -> tuple[bytes, bytes, int]:
    """Run a program; return stdout, the end of stderr and the exit status.

    It writes into files, since what it leaves running would keep pipes open.
    """
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        stdin.write(task)
        stdin.seek(0)
        process = await asyncio.create_subprocess_exec(
            *words, stdin=stdin, stdout=stdout, stderr=stderr, env=environ,
            start_new_session=True,  # a process group of its own
        )  # fmt: skip
        ended = asyncio.create_task(process.wait())
        try:
            running = True
            while running:
                running = not (await asyncio.wait({ended}, timeout=_CHECK_SECONDS))[0]
                _check_size(stdout, "stdout", _MAX_STDOUT_BYTES)
                _check_size(stderr, "stderr", _MAX_STDERR_BYTES)
        finally:
            _kill_group(process)
            await ended
        stdout.seek(0)
        stderr.seek(-min(stderr.seek(0, os.SEEK_END), 4 * _MAX_STDERR_CHARS), os.SEEK_END)
        return stdout.read(), stderr.read(), ended.result()


def _check_size(file: IO[bytes], name: str, limit: int) -> None:
    if os.fstat(file.fileno()).st_size > limit:
        raise WorkflowFailed(f"the program wrote more than {limit:,} bytes to {name}")


def _kill_group(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _read(output: bytes) -> WorkflowOutput:
    text = output.decode(errors="replace").strip()
    if text.startswith("{"):
        with contextlib.suppress(ValueError, RecursionError):
            found: Any = json.loads(text)
            if isinstance(found, dict) and set(found) <= _PARTS:
                return outcome_of(found)
    return WorkflowOutput(text)


_MAX_RESPONSE_CHARS = 4 * 2**20  # characters of a response
_MAX_DEPTH = 50


@dataclasses.dataclass(frozen=True, slots=True)
class WorkflowOutput:
    """What a workflow returns.

    response  the answer that the judge gets; messages are converted to text, records to mappings
    reward    the workflow's own score, a finite number of at most 1e9; None leaves it to the judge
    metrics   name -> number, shown and stored beside the score
    """

    response: Any = None
    reward: float | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def text(self) -> str | None:
        """The response as JSON text, or None."""
        return None if self.response is None else json.dumps(self.response)


def outcome_of(answer: Any) -> WorkflowOutput:
    """Read a workflow's return value. Raises WorkflowFailed.

    A mapping with no keys besides response, reward and metrics, or an object with `response` and one of the others, is
    split into these parts; any other value is the response.
    """
    if isinstance(answer, Mapping) and answer and set(answer) <= _PARTS:
        parts = answer
    elif hasattr(answer, "response") and (hasattr(answer, "reward") or hasattr(answer, "metrics")):
        parts = {name: getattr(answer, name, None) for name in _PARTS}
    else:
        parts = {"response": answer}
    response = plain(parts.get("response"))
    if response is not None and len(json.dumps(response)) > _MAX_RESPONSE_CHARS:
        raise WorkflowFailed(
            f"the response is longer than {_MAX_RESPONSE_CHARS:,} characters; return only what the judge needs"
        )
    return WorkflowOutput(response, _reward(parts.get("reward")), _metrics(parts.get("metrics")))


def _reward(value: Any) -> float | None:
    if value is None:
        return None
    reward = number_of(value)
    if reward is None:
        raise WorkflowFailed(
            f"the reward is {value!r:.100}; return a finite number {SCORE_RANGE}, or None to leave it to the judge"
        )
    return reward


def _metrics(value: Any) -> dict[str, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise WorkflowFailed(f"metrics is {type(value).__name__}; return a mapping of names to numbers")
    wrong = [name for name, number in value.items() if number_of(number) is None]
    if wrong:
        raise WorkflowFailed(f"metrics holds no finite number {SCORE_RANGE} for {', '.join(map(str, wrong[:5]))}")
    return {str(name): float(number) for name, number in value.items()}


def plain(value: Any, depth: int = 0) -> Any:
    """Return a value as JSON; None for an object without readable content.

    Records (dataclasses, pydantic models, objects with `to_dict`) become mappings; a message object with
    `get_text_content`, as agent frameworks have, becomes its text.
    """
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth > _MAX_DEPTH:
        raise WorkflowFailed(f"the response is nested deeper than {_MAX_DEPTH} levels, or contains itself")
    if isinstance(value, Mapping):
        return {str(key): plain(inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(inner, depth + 1) for inner in value]
    for name in ("get_text_content", "model_dump", "to_dict"):
        method = getattr(value, name, None)
        if callable(method) and not isinstance(value, type):
            return plain(method(), depth + 1)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name), depth + 1) for field in dataclasses.fields(value)}
    kind: Any = type(value)
    return None if kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__ else str(value)
