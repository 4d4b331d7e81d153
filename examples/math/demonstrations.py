"""Scripted episodes for the warm start of the tiny policy, in the exact messages of AgentScope.

AgentScope adds a reminder with time and time zone after each question, and has its own text for failed tool calls. The
failures are those of untrained agents: a wrong sign, words instead of an expression, an argument outside the schema,
malformed JSON, an answer without calculating, an unused result.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from examples.math.calculator import SCHEMA
from examples.math.problems import LARGEST, WORDINGS, Problem, calculated, draw
from examples.math.prompt import SYSTEM
from examples.tiny_policy.chat_format import Drawn, Messages

NUMBERS = frozenset(str(number) for number in range(LARGEST + 1))
REMINDER = (
    "<system-reminder>Treat the following as the ground truth at this point of the conversation. Anything stated "
    "earlier is outdated, and a later reminder, if any, supersedes this one:\n"
    "<current-time>{time}</current-time>\n<timezone>{zone}</timezone>\n</system-reminder>"
)
ZONES = ("UTC", "Europe/Berlin", "Asia/Shanghai", "America/New_York")
UNEXPECTED = "calculate() got an unexpected keyword argument 'precision'"
UNREADABLE = "not an expression of two numbers"
FAILURES = {"wrong_sign": 0.35, "in_words": 0.20, "extra_argument": 0.20, "blind_answer": 0.15, "malformed_json": 0.10}


@dataclass(frozen=True, slots=True)
class MathMix:
    """Probabilities of a good step; the failures of the first step share the rest."""

    first: float
    retry: float
    answer: float


GOOD = MathMix(first=1.0, retry=1.0, answer=1.0)
MIXED = MathMix(first=0.42, retry=0.35, answer=0.80)


def episode(rng: random.Random, mix: MathMix, held_out: bool = False) -> Messages:
    """Return one scripted episode about a random problem."""
    problem = draw(rng, held_out)
    messages = opening(problem.question, rng)
    result = _calculated(messages, problem, rng, mix)
    if result is None:
        return messages
    text = f"The answer is {result}." if rng.random() < mix.answer else "I am not sure."
    messages.append({"role": "assistant", "content": text})
    return messages


def opening(question: str, rng: random.Random) -> Messages:
    """Return the messages before the agent's first turn."""
    time = f"{rng.randint(2024, 2029)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}T"
    time += f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}:{rng.randint(0, 59):02d}"
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": question},
        {"role": "user", "content": REMINDER.format(time=time, zone=rng.choice(ZONES))},
    ]


def drawn(rng: random.Random, mix: MathMix, held_out: bool = False) -> Drawn:
    """Return an episode with the agent's tools."""
    return episode(rng, mix, held_out), [SCHEMA]


def tail(rng: random.Random) -> Drawn:
    """Return a good episode without its opening: the problem, the call and the result."""
    messages = episode(rng, GOOD)
    return [messages[1], *messages[3:]], None


def _calculated(messages: Messages, problem: Problem, rng: random.Random, mix: MathMix) -> str | None:
    """Append the turns up to the first result; return it, or None if the episode ended before."""
    if rng.random() < mix.first:
        return _call(messages, problem.expression)
    failure = rng.choices(list(FAILURES), list(FAILURES.values()))[0]
    left, sign, right = problem.expression.split()
    if failure == "wrong_sign":
        return _call(messages, f"{left} {rng.choice([other for other in sorted(WORDINGS) if other != sign])} {right}")
    if failure == "blind_answer":
        messages.append({"role": "assistant", "content": f"The answer is {rng.randint(2, LARGEST)}."})
        return None
    if failure == "malformed_json":
        whole = json.dumps({"name": "calculate", "arguments": {"expression": problem.expression}})
        messages.append({"role": "assistant", "content": f"<tool_call>\n{whole[:-2]}\n</tool_call>"})
        return None
    if failure == "in_words":
        word = {"+": "plus", "-": "minus", "*": "times"}[sign]
        _act(messages, {"expression": f"{left} {word} {right}"}, UNREADABLE)
    else:
        _act(messages, {"expression": problem.expression, "precision": 2}, UNEXPECTED)
    if rng.random() > mix.retry:
        messages.append({"role": "assistant", "content": "I cannot work it out."})
        return None
    return _call(messages, problem.expression)


def _call(messages: Messages, expression: str) -> str:
    left, sign, right = expression.split()
    result = str(calculated(int(left), sign, int(right)))
    _act(messages, {"expression": expression}, result)
    return result


def _act(messages: Messages, arguments: dict[str, Any], result: str) -> None:
    function = {"name": "calculate", "arguments": json.dumps(arguments)}
    messages.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]})
    messages.append({"role": "tool", "content": result})
