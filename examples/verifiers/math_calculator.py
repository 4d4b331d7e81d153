"""A taskset of the package verifiers: the problems of examples/math, with a reward and a harness of its own.

Nothing here knows Ratchet: `vf-eval math_calculator` runs it as well. The harness runs in this process, and every call
goes to the endpoint that verifiers gives it. Start in this folder, where verifiers finds the taskset by its name.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import openai
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

TASKS = Path(__file__).parents[1] / "math" / "tasks" / "train.jsonl"
TURNS, MAX_TOKENS = 4, 128
# The tiny policy was trained with this reminder, which AgentScope's agents send. Another model needs none.
REMINDER = (
    "<system-reminder>Treat the following as the ground truth at this point of the conversation. Anything stated "
    "earlier is outdated, and a later reminder, if any, supersedes this one:\n"
    "<current-time>{time:%Y-%m-%dT%H:%M:%S}</current-time>\n<timezone>UTC</timezone>\n</system-reminder>"
)
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Work out an expression.",
        "parameters": {
            "properties": {
                "expression": {"description": "Two whole numbers with +, - or * between them.", "type": "string"}
            },
            "required": ["expression"],
            "type": "object",
        },
    },
}
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class Problem(vf.TaskData):
    """A problem and its answer."""

    answer: str


class MathTask(vf.Task[Problem]):
    """Scores the last number of the reply."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Whether the last number is the answer."""
        return float(re.findall(r"\d+", trace.last_reply)[-1:] == [self.data.answer])

    @vf.metric
    async def tool_calls(self, trace: vf.Trace) -> float:
        """How often the calculator was used."""
        return float(len(trace.tool_messages))


class MathTaskset(vf.Taskset[MathTask]):
    """300 problems in words."""

    def load(self) -> Iterator[MathTask]:
        for line in TASKS.read_text().splitlines():
            row = json.loads(line)
            yield MathTask(Problem(prompt=row["question"], answer=row["answer"]), self.config.task)


class CalculatorHarness(vf.Harness[vf.HarnessConfig]):
    """A loop of model and calculator."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Problem
    ) -> ProgramResult:
        messages: list[Any] = [
            {"role": "system", "content": "You are a helpful math assistant."},
            {"role": "user", "content": data.prompt},
            {"role": "user", "content": REMINDER.format(time=datetime.now())},
        ]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=600) as client:
            for _ in range(TURNS):
                answer = await client.chat.completions.create(
                    model=ctx.model, messages=messages, tools=[TOOL], max_tokens=MAX_TOKENS
                )
                message = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                for call in message.tool_calls or []:
                    result = calculate(call.function.arguments if call.type == "function" else "")
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
                if not message.tool_calls:
                    break
        return ProgramResult(0, "", "")


def calculate(arguments: str) -> str:
    """Return the result, or what is wrong with the arguments."""
    try:
        found = re.fullmatch(r"\s*(\d{1,6})\s*([-+*])\s*(\d{1,6})\s*", str(json.loads(arguments)["expression"]))
    except (ValueError, LookupError, TypeError):
        found = None
    if found is None:
        return "Error: not an expression of two numbers"
    return str(_OPERATORS[found[2]](int(found[1]), int(found[3])))


__all__ = ["CalculatorHarness", "MathTaskset"]
