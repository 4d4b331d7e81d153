"""A judge that every process can call: it scores the answers `a-0`, `a-1`, ... of `test_processes.py`."""

from __future__ import annotations

_SCORES = {"a-0": 0.0, "a-1": 1.0, "a-2": 0.5, "b-0": 1.0, "b-1": 0.0, "b-2": 0.2}


def scripted(response: str) -> float:
    return _SCORES[response]


def by_last_digit(response: str) -> float:
    """Score the answer `NAME-0` with 0 and `NAME-1` with 1."""
    return float(response[-1])
