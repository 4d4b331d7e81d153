"""The agent: an ordinary tool loop over the OpenAI SDK; and the same agent as a workflow.

It has a base URL, a key and a model name, like any agent in production, and sends no headers, fields or ids of its own.
Errors of the server or the model never raise: each rollout ends with a reason and becomes a row of the results.
`ratchet tune --workflow ratchet.demo.email_search.agent:workflow` runs one task of the task set.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI, OpenAIError

from ratchet.demo.email_search.mailbox import DATABASE, Mailbox
from ratchet.demo.email_search.tasks import MailTask, home, matches, task_of
from ratchet.demo.email_search.tools import MAX_TURNS, TOOLS, call_tool, opening
from ratchet.demo.traffic import TaskRollout, connection

MAX_TOKENS = 128


class NoAnswerError(RuntimeError):
    """The server answered an attempt with an error, so that there is nothing to score."""


@dataclass(frozen=True, slots=True)
class Agent:
    """Client, mailbox and sampling parameters, shared by concurrent attempts."""

    client: AsyncOpenAI
    box: Mailbox
    model: str
    temperature: float = 1.0
    max_turns: int = MAX_TURNS
    max_tokens: int = MAX_TOKENS
    other_answers: frozenset[str] = frozenset()

    async def attempt(self, task: MailTask, index: int = 0) -> TaskRollout:
        """Attempt one task."""
        rollout, began = TaskRollout(index, task.id, task.question, task.answer), time.monotonic()
        messages, box = (
            opening(task.question, self.max_turns, task.inbox, task.date),
            self.box.of(task.inbox, task.date),
        )
        create: Any = self.client.chat.completions.create
        while rollout.turns < self.max_turns:
            try:
                response = await create(
                    model=self.model, messages=messages, tools=list(TOOLS), temperature=self.temperature,
                    max_tokens=self.max_tokens,
                )  # fmt: skip
                message = response.choices[0].message
            except (OpenAIError, ValueError, IndexError) as error:  # ValueError: the body is not JSON or not UTF-8
                rollout.fail(error)
                break
            rollout.count(response)
            if _apply(rollout, messages, message, box):
                break
        rollout.tool_calls = len(rollout.tools)
        rollout.success = matches(rollout.answer, task.answer, self.other_answers)
        rollout.seconds = time.monotonic() - began
        return rollout


def _apply(rollout: TaskRollout, messages: list[dict[str, Any]], message: Any, box: Mailbox) -> bool:
    """Append one reply and run its tool calls. Returns whether the rollout is over."""
    messages.append(message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
    if not message.tool_calls:
        rollout.end = "text"
        if "<tool_call>" in (message.content or ""):
            _count_failure(rollout, "malformed_json")
        return True
    for call in message.tool_calls:
        function = getattr(call, "function", None)
        name = function.name if function else call.type
        result = call_tool(box, name, function.arguments if function else "")
        rollout.tools.append(name)
        rollout.mails_read += name == "read_email" and result.failure is None
        if result.failure:
            _count_failure(rollout, result.failure)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result.content})
        if result.answer is not None:
            rollout.answer, rollout.end = result.answer, "answer"
            return True
    return False


def _count_failure(rollout: TaskRollout, failure: str) -> None:
    rollout.tool_failures[failure] = rollout.tool_failures.get(failure, 0) + 1


async def workflow(task: Mapping[str, Any], *, base_url: str, api_key: str, model: str) -> str | None:
    """Returns the agent's answer to a row of the task set, None if it gave none. It scores nothing.

    The mailbox is the one in `EMAIL_SEARCH_HOME`. Raises NoAnswerError on an error of the server.
    """
    box = Mailbox(home() / DATABASE)
    try:
        async with connection(base_url, api_key) as client:
            rollout = await Agent(client, box, model).attempt(task_of(task))
    finally:
        box.close()
    if rollout.end == "api_error":
        raise NoAnswerError(rollout.errors[-1])
    return rollout.answer
