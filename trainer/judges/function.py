"""The judge that is a Python function, named as `module:function`; it may be async.

The function may name any of these parameters and gets those that it names:

    trajectory  {"id", "task", "messages", "tools", "calls", "version", "feedback"}; messages are OpenAI chat messages
    response    what the workflow of a rollout returned; else the text of the last assistant message ("" where none is)
    task        the task's row (dict) where its task set is known; else the task key that the agent sent, or None

It returns a number or bool, or {"score", "components", "explanation"}. An exception, a missing score, or one that is
not a finite number is a judge failure. The function is the user's own code and runs with the trainer's rights.
"""

from __future__ import annotations

import asyncio
import dis
import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from store.records import Transcript, Verdict
from trainer.entry_points import NotImportable, load
from trainer.errors import JudgeError
from trainer.judges import Judgement
from trainer.judges.opinion import Opinion, read, response_of, version_of

PARAMETERS = ("trajectory", "response", "task")


class FunctionJudge:
    """A judge made of one Python function; it is called by one thread at a time."""

    at_once = 1

    def __init__(self, entry_point: str, clock: Callable[[], float] = time.time) -> None:
        self._function, self._named, source = _load(entry_point)
        self._clock = clock
        self._runner: asyncio.Runner | None = None  # one loop for all groups, so that the function may keep a client
        self.name = entry_point
        self.version = version_of(entry_point, source)

    def judge(self, group_id: str | None, members: Sequence[Transcript]) -> Judgement:
        """Return one verdict per member, in order; an async function is asked for all members at once."""
        if not inspect.iscoroutinefunction(self._function):
            return Judgement(tuple(self._verdict(group_id, member) for member in members))
        self._runner = self._runner or asyncio.Runner()
        return Judgement(tuple(self._runner.run(self._all(group_id, members))))

    def close(self) -> None:
        """Close the loop of an async function."""
        if self._runner is not None:
            self._runner.close()

    async def _all(self, group_id: str | None, members: Sequence[Transcript]) -> list[Verdict]:
        return await asyncio.gather(*(self._awaited(group_id, member) for member in members))

    def _verdict(self, group_id: str | None, member: Transcript) -> Verdict:
        began = time.perf_counter()
        try:
            opinion = read(self._asked(member))
        except Exception as error:  # noqa: BLE001  whatever a user's judge raises or returns is a failed verdict
            opinion = Opinion.failed(f"{type(error).__name__}: {error}")
        return self._written(opinion, group_id, member, began)

    async def _awaited(self, group_id: str | None, member: Transcript) -> Verdict:
        began = time.perf_counter()
        try:
            opinion = read(await self._asked(member))
        except Exception as error:  # noqa: BLE001  as above
            opinion = Opinion.failed(f"{type(error).__name__}: {error}")
        return self._written(opinion, group_id, member, began)

    def _asked(self, member: Transcript) -> Any:
        offered = arguments(member)
        return self._function(**{name: offered[name] for name in self._named})

    def _written(self, opinion: Opinion, group_id: str | None, member: Transcript, began: float) -> Verdict:
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
    return {
        "trajectory": {
            "id": run.id,
            "task": run.task,
            "version": run.version,
            "calls": len(member.calls),
            "messages": [dict(message) for message in member.messages],
            "tools": [dict(tool) for tool in member.tools],
            "feedback": [msgspec.structs.asdict(said) for said in member.feedback],
        },
        "response": response_of(member),
        "task": run.task if member.row is None else dict(member.row),
    }


def _load(entry_point: str) -> tuple[Callable[..., Any], tuple[str, ...], str]:
    """Import the function; return it, the parameters that it names and its module's source text."""
    try:
        function, module = load(entry_point)
    except NotImportable as error:
        raise JudgeError(f"judge {entry_point}: {error}") from error
    named = tuple(inspect.signature(function).parameters)
    unknown = [name for name in named if name not in PARAMETERS]
    if unknown or not named:
        raise JudgeError(
            f"judge {entry_point} takes {', '.join(named) or 'nothing'}; it may take {', '.join(PARAMETERS)}"
        )
    if _is_constant(function):
        raise JudgeError(
            f"judge {entry_point} looks at none of its parameters and calls nothing: it gives every trajectory the "
            "same score, and nothing is learnt from that; have it read the response or the trajectory"
        )
    return function, named, inspect.getsource(module)


def _is_constant(function: Callable[..., Any]) -> bool:
    """Whether a plain function reads no variable at all, its parameters included."""
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    return not any(
        instruction.opname.startswith("LOAD_") and not instruction.opname.startswith(("LOAD_CONST", "LOAD_SMALL_INT"))
        for instruction in dis.get_instructions(code)
    )
