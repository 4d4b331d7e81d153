"""The agent: one call of the OpenAI SDK per review, with two worked examples before the question.

A small model that is asked for one word without an example answers in sentences. It has a base URL, a key and a model
name, like any agent in production, and sends no headers, fields or ids of its own.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI, OpenAIError

from ratchet.demo.email_search.agent import TaskRollout
from ratchet.demo.reviews.tasks import NEGATIVE, POSITIVE, ReviewTask, matches

MAX_TOKENS = 8  # a label and the end of the turn are two
_EXAMPLES = (
    ("Review: The soup was splendid. Is it positive or negative?", POSITIVE),
    ("Review: The bath was dirty. Is it positive or negative?", NEGATIVE),
)


def prompt(question: str) -> list[dict[str, str]]:
    """Return the messages of a call."""
    messages = [{"role": "system", "content": "Label reviews."}]
    for review, label in _EXAMPLES:
        messages += [{"role": "user", "content": review}, {"role": "assistant", "content": label}]
    return [*messages, {"role": "user", "content": question}]


@dataclass(frozen=True, slots=True)
class ReviewAgent:
    """Client, model and temperature, shared by concurrent attempts."""

    client: AsyncOpenAI
    model: str
    temperature: float = 1.0

    async def attempt(self, task: ReviewTask, index: int = 0) -> TaskRollout:
        """Label one review. An error of the server never raises: it is the end of the rollout."""
        began = time.monotonic()
        create: Any = self.client.chat.completions.create
        answer, response = None, None
        errors: tuple[str, ...] = ()
        try:
            response = await create(
                model=self.model, messages=prompt(task.question), temperature=self.temperature, max_tokens=MAX_TOKENS
            )
            answer = response.choices[0].message.content
        except (OpenAIError, ValueError, IndexError) as error:  # ValueError: the body is not JSON or not UTF-8
            errors = (f"{type(error).__name__}: {error}"[:300],)
        usage = getattr(response, "usage", None)
        return TaskRollout(
            index=index,
            task_id=task.id,
            question=task.question,
            correct_answer=task.label,
            answer=answer,
            success=matches(answer, task.label),
            end="api_error" if errors else "answer",
            turns=int(not errors),
            tool_calls=0,
            tool_failures={},
            prompt_tokens=usage.prompt_tokens if usage else 0,
            completion_tokens=usage.completion_tokens if usage else 0,
            models=(response.model,) if response else (),
            errors=errors,
            seconds=time.monotonic() - began,
            response_id=response.id if response else None,
        )
