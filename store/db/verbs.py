"""What the operations on all tables share: one transaction for each query or change, conditions, and cached counts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Generic, TypeVar

import sqlalchemy as sa

from ratchet.store.db.bulk import MAX_IN_VALUES
from ratchet.store.db.engine import read, write
from ratchet.store.errors import RecordNotFound
from ratchet.store.records import Record, row_to

# Caches slow counts over all rows.
#
# A count that takes longer than 20 ms is cached for twenty times its duration, so that it uses at most a twentieth of
# one core, however often it is requested. Fast counts are never cached.

_T = TypeVar("_T")

_FAST_SECONDS = 0.02
_CACHE_FACTOR = 20


class CachedCount(Generic[_T]):
    """A cached count. One thread counts at a time."""

    def __init__(self, count: Callable[[], _T]) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._value: _T | None = None
        self._until = 0.0

    def __call__(self) -> _T:
        """Return the count, at most 20 times its duration old."""
        with self._lock:
            began = time.monotonic()
            if self._value is None or began >= self._until:
                self._value = self._count()
                seconds = time.monotonic() - began
                self._until = began + (_CACHE_FACTOR * seconds if seconds > _FAST_SECONDS else 0.0)
            return self._value


# What the operations on all tables share: an engine, one transaction for each query or change, and conditions.

_R = TypeVar("_R", bound=Record)
_V = TypeVar("_V")
MAX_PAGE = 1000  # rows of a list that are read at once


class Verbs:
    """Base of the operations on some tables. Each method here is one transaction."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    def _rows(self, query: sa.Executable) -> Sequence[Any]:
        with read(self._engine) as connection:
            return connection.execute(query).all()

    def _records(self, record: type[_R], query: sa.Executable) -> list[_R]:
        return [row_to(record, row) for row in self._rows(query)]

    def _one(self, record: type[_R], query: sa.Executable, missing: str) -> _R:
        """Return the record of a query's first row. Raises RecordNotFound with the message `missing`."""
        for found in self._records(record, query):
            return found
        raise RecordNotFound(missing)

    def _values(self, query: sa.Executable) -> list[Any]:
        """Return the first column."""
        with read(self._engine) as connection:
            return list(connection.scalars(query))

    def _value(self, query: sa.Executable) -> Any:
        """Return the first column of the first row; None without rows."""
        with read(self._engine) as connection:
            return connection.scalar(query)

    def _change(self, statement: sa.Insert | sa.Update | sa.Delete) -> int:
        """Execute a change; return the number of changed rows."""
        with write(self._engine) as connection:
            return connection.execute(statement).rowcount

    def _changed(self, statement: sa.Update | sa.Delete, column: sa.Column[Any]) -> list[Any]:
        """Execute a change; return this column of the changed rows."""
        with write(self._engine) as connection:
            return list(connection.scalars(statement.returning(column)))


def matches(table: sa.FromClause, **values: Any) -> sa.ColumnElement[bool]:
    """Return the condition that columns have these values, or one of several; None: any value."""
    conditions = [
        table.c[name].in_(value)
        if isinstance(value, Collection) and not isinstance(value, str)
        else table.c[name] == value
        for name, value in values.items()
        if value is not None
    ]
    return sa.and_(sa.true(), *conditions) if len(conditions) != 1 else conditions[0]


def chunks(values: Sequence[_V], size: int = MAX_IN_VALUES) -> Iterator[Sequence[_V]]:
    """Return values in parts that fit into one IN (...)."""
    return (values[start : start + size] for start in range(0, len(values), size))
