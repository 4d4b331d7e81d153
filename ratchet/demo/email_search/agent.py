"""The agent: an ordinary tool loop over the OpenAI SDK, run concurrently.

It has a base URL, a key and a model name, like any agent in production, and sends no headers, fields or ids of its own.
Errors of the server or the model never raise: each rollout ends with a reason and becomes a row of the results.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from openai import AsyncOpenAI, OpenAIError

from ratchet.demo.email_search.mailbox import Mailbox, Searchable
from ratchet.demo.email_search.prompt import MAX_TURNS, opening
from ratchet.demo.email_search.tasks import MailTask, matches
from ratchet.demo.email_search.tools import TOOLS, call_tool

End = Literal["answer", "text", "ran_out_of_turns", "api_error"]
Task = TypeVar("Task")
MAX_TOKENS = 128
TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class TaskRollout:
    """The result of one attempt at one task.

    `index` counts the attempts of the run from 0; `models` are the distinct model names in the responses;
    `tool_failures` counts failures by class; token counts are sums of the server's usage over all calls; `response_id`
    is the id of the last response; `tools` are the tools called, in order; `mails_read` counts the mails opened.
    """

    index: int
    task_id: str
    question: str
    correct_answer: str
    answer: str | None
    success: bool
    end: End
    turns: int
    tool_calls: int
    tool_failures: dict[str, int]
    prompt_tokens: int
    completion_tokens: int
    models: tuple[str, ...]
    errors: tuple[str, ...]
    seconds: float
    response_id: str | None = None
    tools: tuple[str, ...] = ()
    mails_read: int = 0


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
        started_at, state = (
            time.monotonic(),
            _RolloutState(opening(task.question, self.max_turns, task.inbox, task.date)),
        )
        end: End = "ran_out_of_turns"
        for _ in range(self.max_turns):
            try:
                response = await self._ask(state.messages)
            except (OpenAIError, ValueError) as error:  # ValueError: the body is not JSON or not UTF-8
                state.errors.append(f"{type(error).__name__}: {error}"[:300])
                end = "api_error"
                break
            reason = state.apply(response, self.box.of(task.inbox, task.date))
            if reason is not None:
                end = reason
                break
        return TaskRollout(
            index=index,
            task_id=task.id,
            question=task.question,
            correct_answer=task.answer,
            answer=state.answer,
            success=matches(state.answer, task.answer, self.other_answers),
            end=end,
            turns=state.turns,
            tool_calls=len(state.tools),
            tool_failures=dict(state.failures),
            prompt_tokens=state.prompt_tokens,
            completion_tokens=state.completion_tokens,
            models=tuple(state.models),
            errors=tuple(state.errors),
            seconds=time.monotonic() - started_at,
            response_id=state.response_id,
            tools=tuple(state.tools),
            mails_read=state.mails_read,
        )

    async def _ask(self, messages: list[dict[str, Any]]) -> Any:
        create: Any = self.client.chat.completions.create
        return await create(
            model=self.model,
            messages=messages,
            tools=list(TOOLS),
            temperature=self.temperature,
            max_tokens=self.max_tokens,
        )


@dataclass(slots=True)
class _RolloutState:
    """A running rollout: its messages and counters."""

    messages: list[dict[str, Any]]
    answer: str | None = None
    response_id: str | None = None
    turns: int = 0
    tools: list[str] = field(default_factory=list)
    mails_read: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    models: dict[str, None] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    def apply(self, response: Any, box: Searchable) -> End | None:
        """Append one response and run its tool calls. Returns why the rollout ends, or None if it continues."""
        self.models.setdefault(response.model)
        self.response_id = response.id
        if response.usage is not None:
            self.prompt_tokens += response.usage.prompt_tokens
            self.completion_tokens += response.usage.completion_tokens
        if not response.choices:
            self.errors.append("the server sent no choice")
            return "api_error"
        message = response.choices[0].message
        self.turns += 1
        self.messages.append(message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
        if not message.tool_calls:
            self.failures.update(["malformed_json"] if "<tool_call>" in (message.content or "") else [])
            return "text"
        for call in message.tool_calls:
            function = getattr(call, "function", None)
            name = function.name if function else call.type
            result = call_tool(box, name, function.arguments if function else "")
            self.tools.append(name)
            self.mails_read += name == "read_email" and result.failure is None
            self.failures.update([result.failure] if result.failure else [])
            self.messages.append({"role": "tool", "tool_call_id": call.id, "content": result.content})
            if result.answer is not None:
                self.answer = result.answer
                return "answer"
        return None


def shuffled(tasks: Sequence[Task], seed: int) -> Iterator[Task]:
    """Yield the tasks endlessly: each pass contains every task once, in an order determined by `seed`."""
    rng = random.Random(seed)
    while tasks:
        yield from rng.sample(tasks, len(tasks))


async def run_tasks(
    tasks: Iterable[MailTask],
    *,
    base_url: str,
    api_key: str,
    model: str,
    box: Mailbox,
    attempts: int = 1,
    concurrency: int = 64,
    temperature: float = 1.0,
    max_turns: int = MAX_TURNS,
    max_tokens: int = MAX_TOKENS,
    other_answers: Iterable[str] = (),
    on_result: Callable[[TaskRollout], None] | None = None,
    stop: asyncio.Event | None = None,
) -> list[TaskRollout]:
    """Attempt each task `attempts` times, `concurrency` rollouts at a time; return them in the order of their end.

    `tasks` may be endless (`shuffled`); then the run lasts until `stop` is set. After `stop` no attempt starts, and
    running ones finish. `on_result` is called in the event loop at the end of each rollout.
    """
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=TIMEOUT_SECONDS) as client:
        agent = Agent(client, box, model, temperature, max_turns, max_tokens, frozenset(other_answers))
        return await run_attempts(
            tasks, agent.attempt, attempts=attempts, concurrency=concurrency, on_result=on_result, stop=stop
        )


async def run_attempts(
    tasks: Iterable[Task],
    attempt: Callable[[Task, int], Awaitable[TaskRollout]],
    *,
    attempts: int,
    concurrency: int,
    on_result: Callable[[TaskRollout], None] | None = None,
    stop: asyncio.Event | None = None,
) -> list[TaskRollout]:
    """Attempt each task `attempts` times with `attempt(task, index)`; the rest as `run_tasks`."""
    jobs = enumerate(task for task in tasks for _ in range(attempts))
    done: list[TaskRollout] = []

    async def work() -> None:
        for index, task in jobs:
            rollout = await attempt(task, index)
            done.append(rollout)
            if on_result is not None:
                on_result(rollout)
            if stop is not None and stop.is_set():
                return

    async with asyncio.TaskGroup() as group:
        for _ in itertools.repeat(None, concurrency):
            group.create_task(work())
    return done
