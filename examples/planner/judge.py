"""The judge: whether the answer is correct, and whether the plan was.

The component `planner` ignores mistakes and luck of the worker: it is 1 if the delegated steps lead to the correct
answer when computed exactly, and the planner's answer is the last result. Ratchet uses the component with the name of
a role as that role's score.
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
    """Score 1.0 if the response is the task's answer. Raises NoTaskError without the task's row."""
    verdict = single_step.judge(task, response)
    steps = list(_delegated_steps(trajectory.get("messages") or []))
    verdict["components"] |= {"planner": float(_leads_to(steps, task, response))}
    verdict["explanation"] += f"; steps: {', then '.join(step for step, _ in steps) or 'none'}"
    return verdict


def _delegated_steps(messages: list[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield (step, the worker's result) of every delegated step, in order."""
    results = {message.get("tool_call_id"): str(message.get("content")) for message in messages}
    for message in messages:
        for call in message.get("tool_calls") or []:
            try:
                step = json.loads(call["function"]["arguments"])["step"]
            except (ValueError, KeyError, TypeError):
                step = ""
            yield str(step), results.get(call.get("id"), "")


def _leads_to(steps: list[tuple[str, str]], task: Any, response: object) -> bool:
    """Return whether the exact results of the steps end with the answer, and the response with the last result."""
    exact: dict[float, float] = {}  # result of the worker -> exact result
    last = None
    for step, result in steps:
        read = _STEP.fullmatch(step)
        if read is None:
            return False
        left, right = (int(exact.get(float(part), float(part))) for part in (read[1], read[3]))
        last = float(calculated(left, read[2], right))
        exact |= dict.fromkeys(single_step.numbers(result)[-1:], last)
    passed = single_step.numbers("" if response is None else str(response))[-1:]
    return last == float(task["answer"]) and [exact.get(number) for number in passed] == [last]
