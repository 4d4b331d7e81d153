"""An agent that labels reviews with one word, with task set and judge: `python -m ratchet.demo.reviews train | test`.

The demo trains it on a real pretrained model. Each review is positive or negative by its one adjective, and no
adjective of a held-out review occurs in a training review, so a held-out review is never solved by a memorized word.
The split does not depend on a seed.

A small model that is asked for one word without an example answers in sentences, so two worked examples come before the
question. The agent has a base URL, a key and a model name, like any agent in production, and sends no headers, fields
or ids of its own.
"""

from __future__ import annotations

import itertools
import random
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from openai import AsyncOpenAI, OpenAIError

from ratchet.demo.traffic import TaskRollout, command_line, run_verb

POSITIVE, NEGATIVE = LABELS = "positive", "negative"
TRAINING_TASKS, HELD_OUT_TASKS = 160, 60
MAX_TOKENS = 8  # a label and the end of the turn are two
_THINGS = "meal film hotel book concert staff coffee service garden show breakfast train"
_TRAINING_WORDS = {
    POSITIVE: "wonderful brilliant delightful superb charming perfect fantastic lovely great beautiful",
    NEGATIVE: "awful boring dreadful rude terrible horrible disgusting poor bad disappointing",
}
_HELD_OUT_WORDS = {
    POSITIVE: "excellent amazing pleasant marvelous magnificent impressive",
    NEGATIVE: "nasty dull unpleasant miserable ugly annoying",
}
_LABEL_OF = {
    word: label for words in (_TRAINING_WORDS, _HELD_OUT_WORDS) for label in LABELS for word in words[label].split()
}
_REVIEW = "Review: The {} was {}. Is it positive or negative?"


@dataclass(frozen=True, slots=True)
class ReviewTask:
    """A review with its right label. `id` begins with the label."""

    id: str
    question: str
    label: str


def training_tasks() -> list[ReviewTask]:
    return _tasks(_TRAINING_WORDS, TRAINING_TASKS)


def held_out_tasks() -> list[ReviewTask]:
    """Return the 60 held-out reviews, positive and negative in turns."""
    return _tasks(_HELD_OUT_WORDS, HELD_OUT_TASKS)


def _tasks(words: Mapping[str, str], count: int) -> list[ReviewTask]:
    rng = random.Random(7)
    by_label = []
    for label in LABELS:
        pairs = rng.sample(list(itertools.product(_THINGS.split(), words[label].split())), count // 2)
        by_label.append(
            [ReviewTask(f"{label}-{thing}-{word}", _REVIEW.format(thing, word), label) for thing, word in pairs]
        )
    return [task for pair in zip(*by_label, strict=True) for task in pair]


def judge(trajectory: Mapping[str, Any], response: str) -> float:
    """Score a trajectory: 1.0 if `response`, the last answer, is the label of the review, the user's last message.

    Raises LookupError for a review that is not of the task set.
    """
    question = [message["content"] for message in trajectory["messages"] if message["role"] == "user"][-1]
    found = re.fullmatch(_REVIEW.replace("?", r"\?").format(r"\w+", r"(\w+)"), question.strip())
    if found is None or found[1] not in _LABEL_OF:
        raise LookupError(f"not a review of the task set: {question[:120]!r}")
    return float(matches(response, _LABEL_OF[found[1]]))


def matches(given: str | None, label: str) -> bool:
    """Return whether an answer is the label, whatever its case, and with or without a full stop."""
    return (given or "").strip().rstrip(".").casefold() == label


def prompt(question: str) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": "Label reviews."}]
    for example, label in (_REVIEW.format("soup", "splendid"), POSITIVE), (_REVIEW.format("bath", "dirty"), NEGATIVE):
        messages += [{"role": "user", "content": example}, {"role": "assistant", "content": label}]
    return [*messages, {"role": "user", "content": question}]


async def attempt(client: AsyncOpenAI, model: str, temperature: float, task: ReviewTask, index: int) -> TaskRollout:
    """Attempt one task: a single call."""
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
    chosen = command_line("ratchet.demo.reviews")[0].parse_args(arguments)
    return run_verb(
        chosen,
        lambda split: training_tasks() if split == "train" else held_out_tasks(),
        lambda client: partial(attempt, client, chosen.model, chosen.temperature),
    )


if __name__ == "__main__":
    sys.exit(main())
