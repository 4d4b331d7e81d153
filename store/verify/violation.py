"""A finding: a row that is not as it has to be, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ratchet.store.records.base import Record

Page = Sequence[Any]  # rows of one table


class Violation(Record, frozen=True):
    """One row, what is wrong with it, and the remedy."""

    row: str
    problem: str
    remedy: str
