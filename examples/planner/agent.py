"""The planner and its worker: two tool loops; the worker is a tool of the planner.

The planner delegates one step at a time; the worker sees only the step and has a calculator. Both call the same model
at the same base URL. Only their system prompts distinguish them, no header, field or id.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI

from examples.math.calculator import SCHEMA, calculate
from examples.planner.prompt import DELEGATE, PLANNER, WORKER

PLANNER_TURNS = 5
WORKER_TURNS = 3
MAX_TOKENS = 64

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Team:
    """A planner and a worker behind one client."""

    client: AsyncOpenAI
    model: str
    temperature: float = 1.0

    async def solve(self, question: str) -> str:
        """Return the planner's answer, "" if it ran out of turns. Raises the client's errors."""
        messages = [{"role": "system", "content": PLANNER}, {"role": "user", "content": question}]
        return await self._talk(messages, DELEGATE, self._delegate, PLANNER_TURNS)

    async def _delegate(self, arguments: Mapping[str, Any]) -> str:
        messages = [{"role": "system", "content": WORKER}, {"role": "user", "content": str(arguments["step"])}]
        return await self._talk(messages, SCHEMA, self._calculate, WORKER_TURNS) or "no result"

    async def _calculate(self, arguments: Mapping[str, Any]) -> str:
        return await calculate(str(arguments["expression"]))

    async def _talk(
        self,
        messages: Messages,
        tool: dict[str, Any],
        act: Callable[[Mapping[str, Any]], Awaitable[str]],
        turns: int,
    ) -> str:
        """Run the loop of one role until it answers without a tool call."""
        create: Any = self.client.chat.completions.create
        for _ in range(turns):
            answer = await create(
                model=self.model,
                messages=messages,
                tools=[tool],
                temperature=self.temperature,
                max_tokens=MAX_TOKENS,
            )
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
            if not message.tool_calls:
                return message.content or ""
            for call in message.tool_calls:
                content = await _tool_result(act, tool, call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        return ""


async def _tool_result(
    act: Callable[[Mapping[str, Any]], Awaitable[str]], tool: dict[str, Any], name: str, arguments: str
) -> str:
    """Return the tool's result or error text."""
    if name != tool["function"]["name"]:
        return f"there is no tool {name}"
    try:
        return await act(json.loads(arguments))
    except (ValueError, KeyError, TypeError) as error:
        return str(error)
