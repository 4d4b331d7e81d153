"""Which numbers are scores: finite ones up to MAX_SCORE, because statistics add up their squares. Pure."""

from __future__ import annotations

from typing import Any

MAX_SCORE = 1e9  # absolute
SCORE_RANGE = f"from {-MAX_SCORE:g} to {MAX_SCORE:g}"  # in messages


def number_of(value: Any) -> float | None:
    """Return a finite number of at most MAX_SCORE, in absolute terms, as a float; None for any other value.

    A number is what has `__float__`: also a bool, a Decimal, and an array of numpy or torch with one element.
    """
    if not hasattr(type(value), "__float__"):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # such as an array with several elements
        return None
    return number if abs(number) <= MAX_SCORE else None  # false for nan
