"""Retry with reflection within a task, as a workflow: attempt, check, reflect, try again (Reflexion, arXiv:2303.11366).

`reflecting` wraps an agent. The check is what the agent may see in production as well: tests, a compiler, a validator,
a user's reply. Never the right answer: the policy would rely on it. All attempts and reflections go to the same base
URL, so they are one trajectory, and the judge's score of the last answer trains all of them.

`python -m examples.reflexion BASE_URL MODEL QUESTION` tries it.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import openai

import ratchet

Task = Mapping[str, Any]
Attempt = Callable[[openai.AsyncOpenAI, str, Task, Sequence[str]], Awaitable[str]]
Check = Callable[[Task, str], str | None]  # what is wrong with an answer; None: nothing


class Workflow(Protocol):
    """What `--workflow` and `ratchet.tune` take."""

    async def __call__(self, task: Task, base_url: str, api_key: str, model: str) -> ratchet.WorkflowOutput:
        """Run one attempt at a task."""


REFLECT = "Your answer was: {answer}\nIt was refused: {problem}\nIn one sentence, say what to do differently next time."


def reflecting(attempt: Attempt, check: Check, attempts: int = 3) -> Workflow:
    """Return a workflow that makes at most so many attempts; each gets the reflections so far."""

    async def workflow(task: Task, base_url: str, api_key: str, model: str) -> ratchet.WorkflowOutput:
        reflections: list[str] = []
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            for number in range(1, attempts + 1):
                answer = await attempt(client, model, task, reflections)
                problem = check(task, answer)
                if problem is None or number == attempts:
                    break
                request = REFLECT.format(answer=answer, problem=problem)
                reflections.append(await say(client, model, f"{task['question']}\n\n{request}"))
        metrics = {"attempts": float(number), "refused": float(problem is not None)}
        return ratchet.WorkflowOutput(answer, metrics=metrics)

    return workflow


async def say(client: openai.AsyncOpenAI, model: str, prompt: str) -> str:
    """One call."""
    answer = await client.chat.completions.create(model=model, messages=[{"role": "user", "content": prompt}])
    return answer.choices[0].message.content or ""


async def answer_question(client: openai.AsyncOpenAI, model: str, task: Task, reflections: Sequence[str]) -> str:
    """An agent of one call."""
    lessons = "".join(f"\nLesson: {one}" for one in reflections)
    return await say(client, model, f"{task['question']}{lessons}")


def check_number(task: Task, answer: str) -> str | None:
    """The answer's form, which production can check too."""
    return None if answer.strip().lstrip("-").isdigit() else "the answer is not a whole number and nothing else"


workflow = reflecting(answer_question, check_number)  # --workflow examples.reflexion:workflow


if __name__ == "__main__":
    url, name, question = sys.argv[1:]
    print(asyncio.run(workflow({"question": question}, url, "x", name)))
