"""The judge: whether the answer is right, and beside it whether the plan was.

The planner is not to blame for a worker's slip, nor praised for its luck: the component `planner` is 1 where the steps
that it gave lead to the right answer when they are worked out exactly, and its last word passes the last result on.
Ratchet takes the component of a role's name as that role's score.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from examples.math import judge as single_step
from examples.math.problems import calculated

_STEP = re.compile(r"\s*(\d{1,6})\s*([-+*])\s*(\d{1,6})\s*")


def judge(task: Mapping[str, Any] | str | None, response: object, trajectory: Mapping[str, Any]) -> dict[str, Any]:
    """Scores 1.0 where the response gives the task's answer. Raises NoTaskError without the task's row."""
    verdict = single_step.judge(task, response)
    steps = list(_given(trajectory.get("messages") or []))
    verdict["components"] |= {"planner": float(_leads_to(steps, task, response))}
    verdict["explanation"] += f"; steps: {', then '.join(step for step, _ in steps) or 'none'}"
    return verdict


def _given(messages: list[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """(step, what the worker said) of every step that was given, in order."""
    said = {message.get("tool_call_id"): str(message.get("content")) for message in messages}
    for message in messages:
        for call in message.get("tool_calls") or []:
            try:
                step = json.loads(call["function"]["arguments"])["step"]
            except (ValueError, KeyError, TypeError):
                step = ""
            yield str(step), said.get(call.get("id"), "")


def _leads_to(steps: list[tuple[str, str]], task: Any, response: object) -> bool:
    """Whether the steps, worked out exactly, end with the answer, and the response with the last result."""
    meant: dict[float, float] = {}  # what the worker said -> what it should have said
    last = None
    for step, said in steps:
        read = _STEP.fullmatch(step)
        if read is None:
            return False
        left, right = (int(meant.get(float(part), float(part))) for part in (read[1], read[3]))
        last = float(calculated(left, read[2], right))
        meant |= dict.fromkeys(single_step.numbers(said)[-1:], last)
    passed = single_step.numbers("" if response is None else str(response))[-1:]
    return last == float(task["answer"]) and [meant.get(number) for number in passed] == [last]
