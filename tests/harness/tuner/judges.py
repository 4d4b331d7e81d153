"""Judges for the tests of model selection."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any


def exact(task: dict[str, Any], response: str) -> float:
    """1 for the right answer, 0 for any other."""
    return float(response == task["answer"])


def never_content(task: dict[str, Any], response: str) -> float:
    """-1 for the right answer, -2 for any other."""
    return exact(task, response) - 2.0


def hangs(task: dict[str, Any], response: str) -> float:
    """Never returns; the file `judging` says that it was called."""
    Path("judging").touch()
    while True:
        time.sleep(1.0)


def fails_on_some(task: dict[str, Any], response: str) -> float:
    """Can only judge answers below 30."""
    if int(response) >= 30:
        raise ValueError("cannot count so far")
    return exact(task, response)
