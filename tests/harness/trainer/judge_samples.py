"""Judge functions, good and bad, for the tests of judging."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

by_answer: dict[str, Any] = {}  # last message -> what `scripted` returns or raises


def length(response: str) -> int:
    return len(response)


def half(response: str) -> float:
    return 0.5 if response else 0.0


def says_oslo(response: str) -> float:
    return float(response == "Oslo")


def says_rome(response: str) -> float:
    return float(response == "Rome")


pause = threading.Event()  # `scripted` waits while it is not set
pause.set()


def scripted(trajectory: Mapping[str, Any]) -> Any:
    pause.wait(60)
    value = by_answer[trajectory["messages"][-1]["content"]]
    if isinstance(value, Exception):
        raise value
    return value


def unmoved(response: str) -> float:
    """Scores every answer the same."""
    return min(0.5, 1.0 + len(response))


def contrary(trajectory: Mapping[str, Any]) -> float:
    """Inverts the order of `scripted`."""
    return -float(by_answer[trajectory["messages"][-1]["content"]])


_waiting: list[asyncio.Event] = []


async def slow(response: str) -> int:
    """Returns only once three callers wait."""
    mine = asyncio.Event()
    _waiting.append(mine)
    if len(_waiting) == 3:
        for one in _waiting:
            one.set()
    await asyncio.wait_for(mine.wait(), 5)
    return len(response)


def needs_more(response: str, moon_phase: str) -> float:
    return 0.0


not_a_function = 3


def always_zero(response: str) -> float:
    return 0.0


async def always_zero_later(response: str) -> float:
    return 0.0


def comments(trajectory: Mapping[str, Any]) -> Any:
    return {"score": 1, "explanation": " ".join(text["comment"] for text in trajectory["feedback"])}


def originals_first(trajectory: Mapping[str, Any]) -> float:
    """Prefers an agent's own answers to their resamples."""
    return 0.0 if trajectory["id"].startswith("shad_") else 1.0


_together = threading.Barrier(2)


def needs_another_caller(response: str) -> int:
    """Returns only while another thread calls it too."""
    _together.wait(60)
    return len(response)


async def awaits_another_caller(response: str) -> int:
    """The same as a coroutine, which blocks its event loop meanwhile."""
    return needs_another_caller(response)


_BY_NAME = {"a-0": 0.0, "a-1": 1.0, "a-2": 0.5, "b-0": 1.0, "b-1": 0.0, "b-2": 0.2}


def by_name(response: str) -> float:
    return _BY_NAME[response]


def by_last_digit(response: str) -> float:
    """Score the answer `NAME-0` with 0 and `NAME-1` with 1."""
    return float(response[-1])
