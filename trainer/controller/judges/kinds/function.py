"""The judge that is a Python function, named as `module:function` or `path/file.py:function`; it may be async.

The function may name any of these parameters and gets those that it names (one with **kwargs gets all of them):

    trajectory  {"id", "task", "messages", "tools", "tool_outcomes", "calls", "version", "feedback"}; messages are
                OpenAI chat messages, `calls` is how many there were
    response    what the workflow of a rollout returned; else the text of the last assistant message ("" where none is)
    task        the task's row (dict) where its task set is known; else the task key that the agent sent, or None
    tool_outcomes  what became of each tool call, in order: {"tool", "tool_call_id", "outcome", "detail", "result"}

It returns a number or bool, or {"score", "components", "explanation"}. An exception, `sys.exit`, a missing score, or
one that is not a finite number is a judge failure. The function is the user's own code and has the trainer's rights.
"""

from __future__ import annotations

import asyncio
import dis
import inspect
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ratchet.store.records import Transcript, Verdict
from ratchet.trainer.controller.judges import Judgement
from ratchet.trainer.controller.judges.opinion import DraftVerdict, read, response_of, version_of
from ratchet.trainer.controller.judges.tool_outcomes import tool_outcomes
from ratchet.trainer.errors import JudgeError
from ratchet.trainer.user_code.entry_points import NotCallable, NotImportable, Wanted, is_async, load, to_call, wanted
from ratchet.trainer.user_code.exit_guard import exited, exits_raise

PARAMETERS = ("trajectory", "response", "task", "tool_outcomes")


class FunctionJudge:
    """A judge made of one Python function; it is called by at most `concurrency` threads at a time."""

    def __init__(self, entry_point: str, clock: Callable[[], float] = time.time, concurrency: int = 1) -> None:
        self.concurrency = concurrency
        self._function, self._wanted, source = _load(entry_point)
        self._clock = clock
        # One loop for all groups of a thread, so that an async function may keep a client.
        self._runners: dict[int, asyncio.Runner] = {}
        self.name = entry_point
        self.version = version_of(entry_point, source)

    def judge(self, group_id: str | None, members: Sequence[Transcript]) -> Judgement:
        """Return one verdict per member, in order; an async function is asked for all members at once."""
        if not is_async(self._function):
            return Judgement(tuple(self._verdict(group_id, member) for member in members))
        return Judgement(tuple(self._loop().run(self._all(group_id, members))))

    def close(self) -> None:
        """Close the loops of an async function."""
        for runner in self._runners.values():
            runner.close()

    def _loop(self) -> asyncio.Runner:
        thread = threading.get_ident()
        if thread not in self._runners:
            self._runners[thread] = runner = asyncio.Runner()
            runner.get_loop().set_task_factory(exits_raise)
        return self._runners[thread]

    async def _all(self, group_id: str | None, members: Sequence[Transcript]) -> list[Verdict]:
        return await asyncio.gather(*(self._awaited(group_id, member) for member in members))

    def _verdict(self, group_id: str | None, member: Transcript) -> Verdict:
        began = time.perf_counter()
        try:
            opinion = read(self._asked(member))
        except (Exception, SystemExit) as error:  # noqa: BLE001  whatever a judge raises or returns is a failed verdict
            opinion = _failed(error)
        return self._written(opinion, group_id, member, began)

    async def _awaited(self, group_id: str | None, member: Transcript) -> Verdict:
        began = time.perf_counter()
        try:
            opinion = read(await self._asked(member))
        except (Exception, SystemExit) as error:  # noqa: BLE001  as above
            opinion = _failed(error)
        return self._written(opinion, group_id, member, began)

    def _asked(self, member: Transcript) -> Any:
        return self._wanted.call(self._function, arguments(member))

    def _written(self, opinion: DraftVerdict, group_id: str | None, member: Transcript, began: float) -> Verdict:
        return opinion.verdict(
            member,
            group_id,
            judge=self.name,
            version=self.version,
            latency=time.perf_counter() - began,
            judged_at=self._clock(),
        )


def arguments(member: Transcript) -> dict[str, Any]:
    """Return everything that a judge function may ask for, by parameter name."""
    run = member.trajectory
    outcomes = tool_outcomes(member)
    return {
        "trajectory": {
            "id": run.id,
            "task": run.task,
            "version": run.version,
            "calls": len(member.calls),
            "messages": [dict(message) for message in member.messages],
            "tools": [dict(tool) for tool in member.tools],
            "tool_outcomes": outcomes,
            "feedback": [msgspec.structs.asdict(said) for said in member.feedback],
        },
        "response": response_of(member),
        "task": run.task if member.row is None else dict(member.row),
        "tool_outcomes": [dict(outcome) for outcome in outcomes],
    }


def _failed(error: BaseException) -> DraftVerdict:
    reason = exited(error) if isinstance(error, SystemExit) else error
    return DraftVerdict.failed(f"{type(error).__name__}: {reason}")


def _load(entry_point: str) -> tuple[Callable[..., Any], Wanted, str]:
    """Import the function; return it, the parameters that it takes and its module's source text."""
    try:
        found, module = load(entry_point)
        function = to_call(found)
        takes = wanted(function, PARAMETERS)
    except NotImportable as error:
        raise JudgeError(f"judge {entry_point}: {error}") from error
    except NotCallable as error:
        raise JudgeError(f"judge {entry_point}{error}") from error
    if not takes.by_place and not takes.by_name:
        raise JudgeError(f"judge {entry_point} takes nothing of a trajectory; it may take {', '.join(PARAMETERS)}")
    if _is_constant(function):
        raise JudgeError(
            f"judge {entry_point} looks at none of its parameters and calls nothing: it gives every trajectory the "
            "same score, and nothing is learnt from that; have it read the response or the trajectory"
        )
    try:
        return function, takes, inspect.getsource(module)
    except (OSError, TypeError) as error:
        raise JudgeError(
            f"judge {entry_point}: the source of {module.__name__} cannot be read ({error}), and its hash is the "
            "judge's version; put the judge into a file of its own"
        ) from error


def _is_constant(function: Callable[..., Any]) -> bool:
    """Whether a plain function reads no variable at all, its parameters included."""
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    return not any(
        instruction.opname.startswith("LOAD_") and not instruction.opname.startswith(("LOAD_CONST", "LOAD_SMALL_INT"))
        for instruction in dis.get_instructions(code)
    )
