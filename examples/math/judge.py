"""The judge: whether the response gives the task's answer and no other number of its own.

The correct answer somewhere in the text is not enough: a response that lists every number contains it, and "14"
contains "4". The last number must be the answer, and all others must occur in the question.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_NUMBER = re.compile(r"\d+(?:\.\d+)?")


class NoTaskError(LookupError):
    """The task's row is missing; the correct answer is unknown without it."""


def judge(task: Mapping[str, Any] | str | None, response: object) -> dict[str, Any]:
    """Score 1.0 if the response gives the task's answer, else 0.0. Raises NoTaskError without the task's row."""
    if not isinstance(task, Mapping):
        raise NoTaskError(f"task is {task!r}, not a row: import the task set with `ratchet tasks import`")
    right = float(task["answer"])
    given = numbers("" if response is None else str(response))
    own = [number for number in given[:-1] if number not in (*numbers(str(task["question"])), right)]
    correct = bool(given) and given[-1] == right and not own
    summary = f"given {given[-1]:g}" if given else "given no number"
    return {
        "score": float(correct),
        "components": {"answered": float(bool(given)), "correct": float(correct)},
        "explanation": f"{summary}{' among others' if own else ''}; right is {right:g}",
    }


def numbers(text: str) -> list[float]:
    """Return every number in a text, in order."""
    return [float(found) for found in _NUMBER.findall(text)]
