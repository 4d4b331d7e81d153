"""Violations, and the queries that all checks use."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import sqlalchemy as sa

from ratchet.store.db.bulk import MAX_IN_VALUES
from ratchet.store.db.column_types import Body, Ids
from ratchet.store.records.base import Record

Page = Sequence[Any]  # rows of one table


class Violation(Record, frozen=True):
    """A row that breaks an invariant, the problem, and the remedy."""

    row: str
    problem: str
    remedy: str


def undecoded(table: sa.Table) -> list[sa.ColumnElement[Any]]:
    """Return a table's columns, encoded ones as raw bytes: a damaged value must not stop the check of its page."""
    return [_undecoded(column) for column in table.c]


def _undecoded(column: sa.Column[Any]) -> sa.ColumnElement[Any]:
    if isinstance(column.type, (Body, Ids)):
        return sa.type_coerce(column, sa.LargeBinary).label(column.name)
    return sa.type_coerce(column, sa.Text).label(column.name) if isinstance(column.type, sa.JSON) else column


def existing_values(connection: sa.Connection, column: sa.Column[str], values: Collection[str]) -> set[str]:
    """Return the values that occur in a column."""
    ordered, found = sorted(values), set()
    for start in range(0, len(ordered), MAX_IN_VALUES):
        chunk = ordered[start : start + MAX_IN_VALUES]
        found |= set(connection.scalars(sa.select(column).where(column.in_(chunk))))
    return found
