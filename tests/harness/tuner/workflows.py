"""Workflows for the tests: agents that do not know the tuner, and some that fail."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
from typing import Any

import openai

from ratchet.tuner.rollouts.workflow import WorkflowOutput


async def ask(task: dict[str, Any], *, base_url: str, api_key: str, model: str) -> str:
    """The smallest agent: one question, one answer."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        answer = await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": task["question"]}]
        )
    return answer.choices[0].message.content or ""


def ask_in_a_thread(task: dict[str, Any], base_url: str, api_key: str, model: str) -> dict[str, Any]:
    """The same, not async, with metrics."""
    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        answer = client.chat.completions.create(model=model, messages=[{"role": "user", "content": task["question"]}])
    return {"response": answer.choices[0].message.content, "metrics": {"turns": 1}}


async def rewards_itself(task: dict[str, Any], base_url: str, api_key: str, model: str) -> WorkflowOutput:
    """Returns its own reward."""
    text = await ask(task, base_url=base_url, api_key=api_key, model=model)
    return WorkflowOutput(text, reward=float(task["answer"] in text))


def everything(**given: Any) -> dict[str, Any]:
    """Returns what it was given."""
    return given


def only_the_task(task: dict[str, Any]) -> Any:
    """Returns the task."""
    return task


class Counting:
    """An agent that is an object, created once for all rollouts."""

    def __init__(self) -> None:
        self.calls = 0

    async def __call__(self, task: dict[str, Any]) -> int:
        self.calls += 1
        return self.calls

    @staticmethod
    def fixed(task: dict[str, Any]) -> str:
        return str(task["answer"])


class Unmakeable(Counting):
    def __init__(self, browser: str) -> None:
        super().__init__()


class Uncallable:
    """No agent."""


def yields(task: dict[str, Any]) -> Any:
    """Yields instead of returning."""
    yield task["answer"]


def is_interrupted(task: dict[str, Any]) -> None:
    """Raises KeyboardInterrupt without Ctrl-C."""
    raise KeyboardInterrupt


def prints(task: dict[str, Any]) -> str:
    """Prints its progress."""
    print("agent: thinking about", task["question"])
    return "done"


def by_place(task: dict[str, Any], model: str, /, turns: int = 3) -> str:
    """Takes its parameters by position."""
    return f"{task['question']} {model} {turns}"


def needs_browser(task: dict[str, Any], browser: Any) -> None:
    """Has a parameter that the tuner does not pass."""


def crashes(task: dict[str, Any]) -> None:
    """Fails on every task."""
    raise ValueError(f"no tool named {task.get('tool', 'search')}")


def crashes_in_two_ways(task: dict[str, Any]) -> None:
    """Fails on every task, on one of four with another error."""
    if task["answer"] in ("1", "5"):
        raise KeyError("no such tool")
    raise ValueError("no tool named search")


class Unreadable(Exception):
    """An exception whose text cannot be read."""

    def __str__(self) -> str:
        raise KeyError("no words")


async def fails_oddly(task: dict[str, Any]) -> None:
    """Raises unusual exceptions, chosen by the number in the question."""
    odd = {"0": SystemExit(3), "1": Unreadable(), "2": ValueError("half \ud800 and \0"), "3": StopAsyncIteration()}
    raise odd[task["question"].split()[2]]


def fails_oddly_in_a_thread(task: dict[str, Any]) -> None:
    """The same, not async."""
    odd = {"0": SystemExit(3), "1": Unreadable(), "2": ValueError("half \ud800 and \0"), "3": StopIteration()}
    raise odd[task["question"].split()[2]]


async def exits_in_a_child(task: dict[str, Any]) -> str:
    """Calls sys.exit in a child task on one of the questions."""

    async def child() -> None:
        sys.exit(3)

    if task["question"].split()[2] == "1":
        async with asyncio.TaskGroup() as children:
            children.create_task(child())
    return "done"


async def asks_then_crashes(task: dict[str, Any], base_url: str, api_key: str, model: str) -> None:
    """Calls the model, then fails."""
    await ask(task, base_url=base_url, api_key=api_key, model=model)
    raise RuntimeError("the file could not be written")


async def hangs(task: dict[str, Any]) -> None:
    """Never ends."""
    await asyncio.sleep(3600)


def hangs_in_a_thread(task: dict[str, Any]) -> None:
    """Never ends, and ignores cancellation."""
    time.sleep(3600)


_FIVE = threading.Barrier(5)


def waits_for_four_others(task: dict[str, Any]) -> str:
    """Returns its thread's name once five run."""
    _FIVE.wait(60)
    return threading.current_thread().name


class Callable_:
    """An object that is called."""

    async def __call__(self, task: dict[str, Any]) -> str:
        return f"called with {task['question']}"


an_object = Callable_()
not_a_function = 3


async def asks_elsewhere(task: dict[str, Any]) -> str:
    """Never calls the given URL."""
    return str(task["answer"])


async def asks_greedily(task: dict[str, Any], base_url: str, api_key: str, model: str) -> str:
    """Samples at temperature 0, with its own choice of model."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        answer = await client.chat.completions.create(
            model=task.get("model", model), temperature=0, messages=[{"role": "user", "content": task["question"]}]
        )
    return answer.choices[0].message.content or ""


def by_length(task: dict[str, Any], response: str, trajectory: dict[str, Any]) -> float:
    """A judge that never scores two attempts equally."""
    return len(response) + random.Random(trajectory["id"]).random()


def right(task: dict[str, Any], response: str) -> float:
    """A judge that compares the answer with the row."""
    return float(task["answer"] == response)


def indifferent(response: str) -> float:
    """A judge that scores every answer the same."""
    return 0.5 + 0.0 * len(response)


def picky(task: dict[str, Any], response: str) -> float:
    """A judge that fails."""
    return float(task["no such column"] == response)
