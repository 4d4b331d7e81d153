"""Scripted episodes of both roles for the warm start of the tiny policy.

The planner fails by a wrong sign, a plan that stops half-way, a step in words, or a guessed answer; the worker is good
and rarely fails.
"""

from __future__ import annotations

import json
import random
from typing import Any

from examples.math.calculator import SCHEMA
from examples.math.problems import LARGEST, calculated
from examples.math.problems import draw as draw_step
from examples.planner.problems import TwoStepProblem, draw
from examples.planner.prompt import DELEGATE, PLANNER, WORKER
from examples.tiny_policy.chat_format import Drawn, Messages

GOOD_STEP = 0.70  # of each of the planner's steps
GOOD_PASS = 0.80  # of plans that go on to their second step, and of results that are passed on
GOOD_WORK = 0.95
WORDS = {"+": "plus", "-": "minus", "*": "times"}


def planned(rng: random.Random, good: bool, held_out: bool = False) -> Drawn:
    """Return an episode of the planner, without failures if `good`."""
    plan = draw(rng, held_out)
    messages: Messages = [{"role": "system", "content": PLANNER}, {"role": "user", "content": plan.question}]
    messages.append({"role": "assistant", "content": _answer(messages, plan, rng, good)})
    return messages, [DELEGATE]


def _answer(messages: Messages, plan: TwoStepProblem, rng: random.Random, good: bool) -> str:
    """Append the steps; return the planner's answer."""
    if not good and rng.random() < 0.1:
        return f"The answer is {rng.randint(2, LARGEST)}."
    result = ""
    for step, _ in plan.steps:
        if result and not good and rng.random() > GOOD_PASS:
            break
        delegated = step if not result else f"{result} {step.split()[1]} {step.split()[2]}"
        if not good and rng.random() > GOOD_STEP:
            delegated = _with_mistake(delegated, rng)
        result = _worked_out(delegated)
        _act(messages, "delegate", {"step": delegated}, result or "I am not sure.")
        if not result:
            return "I cannot work it out."
    return f"The answer is {result}." if good or rng.random() < GOOD_PASS else "I am not sure."


def worked(rng: random.Random, good: bool) -> Drawn:
    """Return an episode of the worker."""
    step = draw_step(rng).expression if rng.random() < 0.5 else rng.choice(draw(rng).steps)[0]
    messages: Messages = [{"role": "system", "content": WORKER}]
    if not good and rng.random() < 0.15:
        messages.append({"role": "user", "content": _in_words(step)})
        return [*messages, {"role": "assistant", "content": "I am not sure."}], [SCHEMA]
    messages.append({"role": "user", "content": step})
    if not good and rng.random() > GOOD_WORK:
        return [*messages, {"role": "assistant", "content": "I am not sure."}], [SCHEMA]
    result = _worked_out(step)
    _act(messages, "calculate", {"expression": step}, result)
    return [*messages, {"role": "assistant", "content": result}], [SCHEMA]


def _worked_out(step: str) -> str:
    """Return the result of a step; "" if it is in words, or outside the numbers that the tiny policy knows."""
    left, sign, right = step.split()
    if sign not in WORDS:
        return ""
    result = calculated(int(left), sign, int(right))
    return str(result) if 0 <= result <= LARGEST else ""


def _with_mistake(step: str, rng: random.Random) -> str:
    left, sign, right = step.split()
    if rng.random() < 0.3:
        return _in_words(step)
    wrong = [other for other in WORDS if other != sign and _worked_out(f"{left} {other} {right}")]
    return f"{left} {rng.choice(wrong)} {right}" if wrong else _in_words(step)


def _in_words(step: str) -> str:
    left, sign, right = step.split()
    return f"{left} {WORDS[sign]} {right}"


def _act(messages: Messages, name: str, arguments: dict[str, Any], result: str) -> None:
    function = {"name": name, "arguments": json.dumps(arguments)}
    messages.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]})
    messages.append({"role": "tool", "content": result})
