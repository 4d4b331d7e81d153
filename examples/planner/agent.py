"""The planner and its worker: an ordinary tool loop each, the one a tool of the other.

The planner gives the worker one step at a time; the worker, who sees nothing but the step, has a calculator. Both ask
for the same model at the same base URL. No header, field or id tells them apart, only what they are told.
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
        """The planner's last word; nothing where it ran out of turns. Raises what the client raises."""
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
        """One role's loop over its one tool: until it says something without using it."""
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
                content = await _acted(act, tool, call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        return ""


async def _acted(
    act: Callable[[Mapping[str, Any]], Awaitable[str]], tool: dict[str, Any], name: str, arguments: str
) -> str:
    """What a tool says to a call of the model, its failures included."""
    if name != tool["function"]["name"]:
        return f"there is no tool {name}"
    try:
        return await act(json.loads(arguments))
    except (ValueError, KeyError, TypeError) as error:
        return str(error)
