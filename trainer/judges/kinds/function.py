"""The function judge: a Python function, sync or async, as an object, `module:function` or `path/file.py:function`.

The function receives those of these parameters that it declares (with **kwargs all of them):

    trajectory     {"id", "task", "messages", "tools", "tool_outcomes", "calls", "version", "feedback"}; messages are
                   OpenAI chat messages, `calls` is the number of calls
    response       the response of a rollout's workflow; else the text of the last assistant message, "" if none;
                   text also has `get_text_content()`, as messages of AgentScope have
    task           the task's row (dict) if its task set is known; else the task key that the agent sent, or None
    tool_outcomes  the outcome of each tool call, in order: {"tool", "tool_call_id", "outcome", "detail", "result"}

A judge that is written for AgentScope's tuner may also take `auxiliary_models`, the chat models of `models`
(plugins/agentscope).

It returns a number or bool, a `ratchet.Judgement`, or {"score", "components", "explanation"}. An exception, `sys.exit`,
and a missing or non-finite score are judge failures. The function runs with the trainer's rights.
"""

from __future__ import annotations

import asyncio
import dis
import inspect
import itertools
import marshal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from ratchet.store.records import Transcript, Verdict
from ratchet.trainer.errors import JudgeError, NotCallable, NotImportable
from ratchet.trainer.judges.judgement import (
    DraftVerdict,
    GroupJudgement,
    NamedJudge,
    read,
    response_of,
    version_of,
)
from ratchet.trainer.judges.transcript_json import tool_outcomes
from ratchet.trainer.user_code import (
    AcceptedParameters,
    ModelServer,
    ResponseText,
    accepted_parameters,
    adapted,
    exit_failure,
    guarded_task,
    is_async,
    load,
    name_of,
    to_callable,
)

PARAMETERS = ("trajectory", "response", "task", "tool_outcomes")


class FunctionJudge(NamedJudge):
    """Judges with one Python function, called by at most `concurrency` threads at the same time."""

    def __init__(
        self,
        function: str | Callable[..., Any],
        clock: Callable[[], float] = time.time,
        concurrency: int = 1,
        models: ModelServer | None = None,
    ) -> None:
        super().__init__(clock)
        self.concurrency = concurrency
        self.name = function if isinstance(function, str) else name_of(function)
        self._function, self._accepted, source = _load(function, self.name, models)
        # One event loop per thread, so that an async function can keep a client.
        self._runners: dict[int, asyncio.Runner] = {}
        self.version = version_of(self.name, source)

    @property
    def names_calls(self) -> bool:
        """Whether the function names a parameter that only recorded calls fill."""
        return bool({"trajectory", "tool_outcomes"} & inspect.signature(self._function).parameters.keys())

    def judge(self, group_id: str | None, members: Sequence[Transcript]) -> GroupJudgement:
        """Return one verdict per member, in order; an async function judges all members concurrently."""
        if not is_async(self._function):
            return GroupJudgement(tuple(self._verdict(group_id, member) for member in members))
        return GroupJudgement(tuple(self._loop().run(self._all(group_id, members))))

    def opinion_on(self, values: Mapping[str, Any]) -> DraftVerdict:
        """Judge one trajectory, given as the values of `arguments`."""
        try:
            answer = self._accepted.call(self._function, values)
            return read(self._loop().run(answer) if is_async(self._function) else answer)
        except (Exception, SystemExit) as error:  # noqa: BLE001  a user's judge may raise any exception
            return _failed(error)

    def close(self) -> None:
        for runner in self._runners.values():
            if not runner.get_loop().is_running():  # else a judgement of a cancelled run is in progress
                runner.close()

    def _loop(self) -> asyncio.Runner:
        thread = threading.get_ident()
        if thread not in self._runners:
            self._runners[thread] = runner = asyncio.Runner()
            runner.get_loop().set_task_factory(guarded_task)
        return self._runners[thread]

    async def _all(self, group_id: str | None, members: Sequence[Transcript]) -> list[Verdict]:
        return await asyncio.gather(*(self._async_verdict(group_id, member) for member in members))

    def _verdict(self, group_id: str | None, member: Transcript) -> Verdict:
        started_at = time.perf_counter()
        try:
            values = arguments(member)
        except Exception as error:  # noqa: BLE001  such as a response that is not JSON
            opinion = _failed(error)
        else:
            opinion = self.opinion_on(values)
        return self.record(opinion, group_id, member, latency=time.perf_counter() - started_at)

    async def _async_verdict(self, group_id: str | None, member: Transcript) -> Verdict:
        started_at = time.perf_counter()
        try:
            opinion = read(await self._accepted.call(self._function, arguments(member)))
        except (Exception, SystemExit) as error:  # noqa: BLE001  as above
            opinion = _failed(error)
        return self.record(opinion, group_id, member, latency=time.perf_counter() - started_at)


def arguments(member: Transcript) -> dict[str, Any]:
    """Return the values of all parameters of judge functions, by name."""
    run = member.trajectory
    outcomes = tool_outcomes(member)
    response = response_of(member)
    return {
        "trajectory": {
            "id": run.id,
            "task": run.task,
            "version": run.version,
            "calls": len(member.calls),
            "messages": [dict(message) for message in member.messages],
            "tools": [dict(tool) for tool in member.tools],
            "tool_outcomes": outcomes,
            "feedback": [msgspec.structs.asdict(entry) for entry in member.feedback],
        },
        "response": ResponseText(response) if isinstance(response, str) else response,
        "task": run.task if member.row is None else dict(member.row),
        "tool_outcomes": [dict(outcome) for outcome in outcomes],
    }


def _failed(error: BaseException) -> DraftVerdict:
    reason = exit_failure(error) if isinstance(error, SystemExit) else error
    return DraftVerdict.failed(f"{type(error).__name__}: {reason}")


def _load(
    given: str | Callable[..., Any], name: str, models: ModelServer | None
) -> tuple[Callable[..., Any], AcceptedParameters, str]:
    """Import the function if need be; return it, its accepted parameters and the source that its version hashes."""
    try:
        found, module = load(given) if isinstance(given, str) else (given, None)
        function = to_callable(found)
        made = adapted("judge", function, PARAMETERS, models)
        accepted = accepted_parameters(made, PARAMETERS)
    except NotImportable as error:
        raise JudgeError(f"judge {name}: {error}") from error
    except NotCallable as error:
        raise JudgeError(f"judge {name}{error}") from error
    if not accepted.positional and not accepted.by_name:
        raise JudgeError(f"judge {name} takes no parameter of a trajectory; it can take {', '.join(PARAMETERS)}")
    if _is_constant(function):
        raise JudgeError(
            f"judge {name} uses none of its parameters and calls nothing: every trajectory gets the same score, "
            "which gives no learning signal; make it read the response or the trajectory"
        )
    if _returns_nothing(function):
        raise JudgeError(
            f"judge {name} returns nothing: end it with a score, such as `return 1.0`, or with "
            "`return ratchet.Judgement(score)`"
        )
    if module is None:
        return made, accepted, _source_of(function)
    try:
        return made, accepted, inspect.getsource(module)
    except (OSError, TypeError) as error:
        raise JudgeError(
            f"judge {name}: cannot read the source of {module.__name__} ({error}), whose hash is the judge's "
            "version; put the judge into a file of its own"
        ) from error


def _source_of(function: Callable[..., Any]) -> str:
    """Return the source of a function object, else its byte code: one that was typed into a shell has no file."""
    try:
        return inspect.getsource(function if inspect.isroutine(function) else type(function))
    except (OSError, TypeError):
        code = getattr(function, "__code__", None)
        return repr(function) if code is None else repr(marshal.dumps(code))


def _is_constant(function: Callable[..., Any]) -> bool:
    """Return whether a plain function reads no variable, not even its parameters."""
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    return not any(
        instruction.opname.startswith("LOAD_") and not instruction.opname.startswith(("LOAD_CONST", "LOAD_SMALL_INT"))
        for instruction in dis.get_instructions(code)
    )


def _returns_nothing(function: Callable[..., Any]) -> bool:
    """Return whether a plain function returns, and None wherever it does."""
    code = getattr(function, "__code__", None)
    if code is None or inspect.isgeneratorfunction(function):
        return False
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("NOP", "CACHE")]
    values = [step.argval for step in steps if step.opname == "RETURN_CONST"]  # from Python 3.12 to 3.13
    values += [
        before.argval if before.opname == "LOAD_CONST" else ...
        for before, step in itertools.pairwise(steps)
        if step.opname == "RETURN_VALUE"
    ]
    return bool(values) and all(value is None for value in values)
