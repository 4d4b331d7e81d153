"""The agent: one call of the OpenAI SDK per review. `python -m ratchet.demo.reviews train | test`.

A small model that is asked for one word without an example answers in sentences, so two worked examples come before the
question. The agent has a base URL, a key and a model name, like any agent in production, and sends no headers, fields
or ids of its own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from openai import AsyncOpenAI, OpenAIError

from ratchet.demo.reviews.tasks import NEGATIVE, POSITIVE, ReviewTask, held_out_tasks, matches, training_tasks
from ratchet.demo.traffic import TaskRollout, command_line, run_verb

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


async def label(client: AsyncOpenAI, model: str, temperature: float, task: ReviewTask, index: int) -> TaskRollout:
    """Label one review."""
    rollout, began = TaskRollout(index, task.id, task.question, task.label), time.monotonic()
    create: Any = client.chat.completions.create
    try:
        response = await create(
            model=model, messages=prompt(task.question), temperature=temperature, max_tokens=MAX_TOKENS
        )
        rollout.answer, rollout.end = response.choices[0].message.content, "answer"
        rollout.count(response)
    except (OpenAIError, ValueError, IndexError) as error:  # ValueError: the body is not JSON or not UTF-8
        rollout.fail(error)
    rollout.success = matches(rollout.answer, task.label)
    rollout.seconds = time.monotonic() - began
    return rollout


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    parser, _ = command_line("ratchet.demo.reviews")
    chosen = parser.parse_args(arguments)
    return run_verb(
        chosen,
        lambda split: training_tasks() if split == "train" else held_out_tasks(),
        lambda client: lambda task, index: label(client, chosen.model, chosen.temperature, task, index),
    )


if __name__ == "__main__":
    sys.exit(main())
