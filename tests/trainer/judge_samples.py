"""Judge functions, good and bad, for the tests of judging."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

by_answer: dict[str, Any] = {}  # last message -> what `scripted` returns or raises


def length(response: str) -> int:
    return len(response)


def scripted(trajectory: Mapping[str, Any]) -> Any:
    value = by_answer[trajectory["messages"][-1]["content"]]
    if isinstance(value, Exception):
        raise value
    return value


def needs_more(response: str, moon_phase: str) -> float:
    return 0.0


not_a_function = 3
