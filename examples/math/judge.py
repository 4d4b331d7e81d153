"""The judge: whether the response says the task's answer, and no other number of its own.

A right answer somewhere in a text is not enough: a response that lists every number holds it too, and "4" stands in
"14". So the last number said must be the right one, as a number, and all others must be the question's own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_NUMBER = re.compile(r"\d+(?:\.\d+)?")


class NoTaskError(LookupError):
    """The judge was not given the task's row, without which nobody knows what is right."""


def judge(task: Mapping[str, Any] | str | None, response: object) -> dict[str, Any]:
    """Scores 1.0 where the response gives the task's answer, else 0.0. Raises NoTaskError without the task's row."""
    if not isinstance(task, Mapping):
        raise NoTaskError(f"task is {task!r}, not a row: import the task set with `ratchet tasks import`")
    right = float(task["answer"])
    said = numbers("" if response is None else str(response))
    own = [number for number in said[:-1] if number not in (*numbers(str(task["question"])), right)]
    correct = bool(said) and said[-1] == right and not own
    told = f"said {said[-1]:g}" if said else "said no number"
    return {
        "score": float(correct),
        "components": {"answered": float(bool(said)), "correct": float(correct)},
        "explanation": f"{told}{' among others' if own else ''}; right is {right:g}",
    }


def numbers(text: str) -> list[float]:
    """Every number in a text, in order."""
    return [float(found) for found in _NUMBER.findall(text)]
