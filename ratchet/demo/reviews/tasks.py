"""The task set and its judge: short reviews, each positive or negative by its one adjective.

No adjective of a held-out review occurs in a training review, so a held-out review is never solved by a memorized
word. The split does not depend on a seed. A review occurs once in the whole set.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

POSITIVE, NEGATIVE = "positive", "negative"
LABELS = (POSITIVE, NEGATIVE)
TRAINING_TASKS, HELD_OUT_TASKS = 160, 60
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
_REVIEW = re.compile(r"Review: The \w+ was (\w+)\. Is it positive or negative\?")


@dataclass(frozen=True, slots=True)
class ReviewTask:
    """A review with its right label. `id` begins with the label."""

    id: str
    question: str
    label: str


def training_tasks() -> list[ReviewTask]:
    """Return the 160 training reviews, half of them positive."""
    return _tasks(_TRAINING_WORDS, TRAINING_TASKS)


def held_out_tasks() -> list[ReviewTask]:
    """Return the 60 held-out reviews, positive and negative in turns."""
    return _tasks(_HELD_OUT_WORDS, HELD_OUT_TASKS)


def label_of(question: str) -> str:
    """Return the right label of a review. Raises LookupError if it is not of the task set."""
    found = _REVIEW.fullmatch(question.strip())
    if found is None or found[1] not in _LABEL_OF:
        raise LookupError(f"not a review of the task set: {question[:120]!r}")
    return _LABEL_OF[found[1]]


def judge(trajectory: Mapping[str, Any], response: str) -> float:
    """Score a trajectory: 1.0 if `response`, the last answer, is the label of the review, the user's last message.

    Raises LookupError for a review that is not of the task set.
    """
    questions = [message["content"] for message in trajectory["messages"] if message["role"] == "user"]
    return float(matches(response, label_of(questions[-1])))


def matches(given: str | None, label: str) -> bool:
    """Return whether an answer is the label, whatever its case, and with or without a full stop."""
    return (given or "").strip().rstrip(".").casefold() == label


def _tasks(words: Mapping[str, str], count: int) -> list[ReviewTask]:
    rng = random.Random(7)
    by_label = []
    for label in LABELS:
        pairs = list(itertools.product(_THINGS.split(), words[label].split()))
        by_label.append([_task(thing, word, label) for thing, word in rng.sample(pairs, count // 2)])
    return [task for pair in zip(*by_label, strict=True) for task in pair]


def _task(thing: str, word: str, label: str) -> ReviewTask:
    question = f"Review: The {thing} was {word}. Is it positive or negative?"
    return ReviewTask(f"{label}-{thing}-{word}", question, label)
