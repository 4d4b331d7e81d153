"""The agent: an ordinary loop over three tools and the OpenAI SDK; and the same agent as a workflow.

It has a base URL, a key and a model name, like any agent in production, and sends no headers, fields or ids of its own.
Errors of the server or the model never raise: each rollout ends with a reason and becomes a row of the results.
`ratchet tune --workflow ratchet.demo.email_search.agent:workflow` runs one task of the task set.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI, OpenAIError

from ratchet.demo.email_search.mailbox import DATABASE, TODAY, USER_EMAIL, Mailbox
from ratchet.demo.email_search.tasks import MailTask, home, matches, task_of
from ratchet.demo.traffic import TaskRollout, connection

MAX_TOKENS = 128
MAX_TURNS = 6
ARGUMENT = {"search_inbox": "keywords", "read_email": "message_id", "return_final_answer": "answer"}
ACCEPTED = "done"


def opening(question: str, max_turns: int = MAX_TURNS, inbox: str = "", date: str = "") -> list[dict[str, Any]]:
    """Return the first two messages of a rollout, short because the tiny policy reads them in every call."""
    user, today = inbox or USER_EMAIL, date or TODAY
    system = f"Search the inbox of {user} with the tools. Today is {today}. You may take {max_turns} turns."
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def _tool(name: str, description: str, schema: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {ARGUMENT[name]: schema}, "required": [ARGUMENT[name]]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


_STRING = {"type": "string"}
TOOLS: tuple[dict[str, Any], ...] = (
    _tool(
        "search_inbox",
        "Find mails that hold every keyword. Returns message ids and subjects.",
        {"type": "array", "items": _STRING},
    ),
    _tool("read_email", "Read the mail with this message id.", _STRING),
    _tool("return_final_answer", "End the task with the answer, as short as possible.", _STRING),
)


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """The text for the model, the failure class (None: success), and the final answer if the call gave one.

    Failure classes: malformed_json, unknown_tool, unexpected_argument, missing_argument, wrong_type, no_hits,
    no_such_message.
    """

    content: str
    failure: str | None = None
    answer: str | None = None


def call_tool(box: Mailbox, name: str, arguments: str) -> ToolOutput:
    """Run tool `name` with `arguments`, the JSON text from the model."""
    if name not in ARGUMENT:
        return _failed("unknown_tool", f"unknown tool {name}")
    try:
        parsed = json.loads(arguments)
    except ValueError:
        return _failed("malformed_json", "arguments are not JSON")
    if not isinstance(parsed, dict):
        return _failed("wrong_type", "arguments must be an object")
    key = ARGUMENT[name]
    extra = next((field for field in parsed if field != key), None)
    if extra is not None:
        return _failed("unexpected_argument", f"unexpected argument {extra}")
    if key not in parsed:
        return _failed("missing_argument", f"missing argument {key}")
    if name == "search_inbox":
        return _search(box, parsed[key])
    if not isinstance(parsed[key], str):
        return _failed("wrong_type", f"{key} must be a string")
    if name == "read_email":
        body = box.read(parsed[key])
        return _failed("no_such_message", "no such message") if body is None else ToolOutput(body)
    return ToolOutput(ACCEPTED, answer=parsed[key])


def _search(box: Mailbox, keywords: object) -> ToolOutput:
    if not isinstance(keywords, list) or not keywords or not all(isinstance(word, str) for word in keywords):
        return _failed("wrong_type", "keywords must be a list of strings")
    hits = [{"message_id": message_id, "subject": subject} for message_id, subject in box.search(keywords)]
    return ToolOutput(json.dumps(hits, ensure_ascii=False), None if hits else "no_hits")


def _failed(failure: str, text: str) -> ToolOutput:
    return ToolOutput(json.dumps({"error": text}), failure)


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
        messages = opening(task.question, self.max_turns, task.inbox, task.date)
        box = self.box.of(task.inbox, task.date)
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
