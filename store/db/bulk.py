"""Writes many rows with one compiled statement, and truncates text to its column.

It skips SQLAlchemy's work per row: column types still encode the values, but all rows must have the same columns,
including every column without a default in the database; one that is None in all rows is left out. Errors are
SQLAlchemy's, except for a value that does not fit its type. Agents and upstreams choose text of any length; no database
refuses a row for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from itertools import chain
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

Row = dict[str, Any]

MAX_IN_VALUES = 500  # values in one IN (...)
_ROWS = 16  # of one INSERT: a statement costs as much as some rows, above all in PostgreSQL
_NAMES = "names"  # the parameter of `select_in`
_MAX_STATEMENTS = 256  # in the cache: dialects (one per engine) x tables


def insert(connection: sa.Connection, table: sa.Table, rows: Sequence[Row], *, new_only: bool = False) -> int:
    """Insert rows; return the number. With `new_only`, existing rows (by primary key) stay as they are."""
    return insert_columns(connection, table, _columns(rows), new_only=new_only)


def insert_columns(
    connection: sa.Connection, table: sa.Table, columns: Mapping[str, Sequence[Any]], *, new_only: bool = False
) -> int:
    """Insert rows given as columns; otherwise like `insert`."""
    if not columns or not next(iter(columns.values())):
        return 0
    names = tuple(name for name, values in columns.items() if values.count(None) < len(values))
    statement = _compiled(connection.dialect, table, names, new_only)
    rows = statement.values(columns)
    whole = len(rows) - len(rows) % _ROWS
    count = 0
    if whole:
        several = [tuple(chain.from_iterable(rows[at : at + _ROWS])) for at in range(0, whole, _ROWS)]
        count += connection.exec_driver_sql(statement.text_of_rows, several).rowcount
    if rows[whole:]:
        count += connection.exec_driver_sql(statement.text, rows[whole:]).rowcount
    return count


def in_values(connection: sa.Connection, column: sa.Column[str], names: Sequence[str]) -> sa.ColumnElement[bool]:
    """Return the condition that a text column is one of these names. The statement does not depend on their number."""
    return _one_of(connection.dialect, column, None, names)


def _one_of(
    dialect: sa.Dialect, column: sa.Column[str], name: str | None, names: Sequence[str] | None
) -> sa.ColumnElement[bool]:
    if dialect.name == "postgresql":
        return column == sa.any_(sa.bindparam(name, names, sa.ARRAY(sa.String)))
    listed = sa.func.json_each(sa.bindparam(name, names, sa.JSON)).table_valued("value")
    return column.in_(sa.select(listed.c.value))


def select_in(
    connection: sa.Connection, query: sa.Select[Any], column: sa.Column[str], names: Sequence[str]
) -> Iterable[Any]:
    """Return the rows of a query without parameters whose text column is one of these names.

    The same query object is compiled once; values come as the driver returns them, without conversion.
    """
    statement = _compiled_select(connection.dialect, query, column)
    return connection.exec_driver_sql(statement.text, statement.values({_NAMES: (names,)})[0])


def execute_many(connection: sa.Connection, statement: sa.Update | sa.Insert, rows: Sequence[Row]) -> None:
    """Execute an UPDATE with `bindparam` values, or an INSERT of all columns, once per row; compiled once.

    A parameter of an UPDATE must not have the name of a column.
    """
    if rows:
        compiled = _compiled_change(connection.dialect, statement)
        connection.exec_driver_sql(compiled.text, compiled.values(_columns(rows)))


def _columns(rows: Sequence[Row]) -> dict[str, Sequence[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}


class _Statement:
    """A statement compiled for a dialect, with the conversion of rows to its parameters."""

    def __init__(
        self, dialect: sa.Dialect, statement: sa.Insert | sa.Update | sa.Select[Any], columns: Sequence[str] | None
    ) -> None:
        compiled: Any = statement.compile(dialect=dialect, column_keys=None if columns is None else list(columns))
        self.text = str(compiled)
        self._names = tuple(compiled.positiontup)
        types = [compiled.binds[name].type.dialect_impl(dialect) for name in self._names]
        self._encoders: list[Callable[[Any], Any] | None] = [kind.bind_processor(dialect) for kind in types]

    @cached_property
    def text_of_rows(self) -> str:
        """The same INSERT with `_ROWS` rows."""
        head, values, rest = self.text.partition(" VALUES ")
        row, conflict, action = rest.partition(" ON CONFLICT ")
        return f"{head}{values}{', '.join([row] * _ROWS)}{conflict}{action}"

    def values(self, columns: Mapping[str, Sequence[Any]]) -> list[tuple[Any, ...]]:
        """Return the rows as parameters for the driver."""
        values: list[Iterable[Any]] = [columns[name] for name in self._names]
        encoded = [
            map(encode, column) if encode else column for encode, column in zip(self._encoders, values, strict=True)
        ]
        return list(zip(*encoded, strict=True))


@lru_cache(maxsize=_MAX_STATEMENTS)
def _compiled(dialect: sa.Dialect, table: sa.Table, columns: tuple[str, ...], new_only: bool) -> _Statement:
    kinds = postgresql if dialect.name == "postgresql" else sqlite
    statement = kinds.insert(table).on_conflict_do_nothing() if new_only else sa.insert(table)
    return _Statement(dialect, statement, columns)


@lru_cache(maxsize=_MAX_STATEMENTS)
def _compiled_change(dialect: sa.Dialect, statement: sa.Update | sa.Insert) -> _Statement:
    return _Statement(dialect, statement, None)


@lru_cache(maxsize=_MAX_STATEMENTS)
def _compiled_select(dialect: sa.Dialect, query: sa.Select[Any], column: sa.Column[str]) -> _Statement:
    return _Statement(dialect, query.where(_one_of(dialect, column, _NAMES, None)), None)


def insert_or_ignore(connection: sa.Connection, table: sa.Table, rows: Sequence[Row]) -> int:
    """Insert the rows whose primary key is new; return their number."""
    return insert(connection, table, rows, new_only=True)


def truncate_row(table: sa.Table, row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with every text truncated to its column, without NUL (which PostgreSQL cannot store)."""
    return {name: values[0] for name, values in truncate_columns(table, {key: (row[key],) for key in row}).items()}


def truncate_columns(table: sa.Table, columns: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """Return columns with every text truncated; a column whose texts all fit is returned as it is."""
    truncated = dict(columns)
    for name, length in _text_lengths(table):
        texts = [value for value in truncated.get(name, ()) if value is not None]
        if texts and (max(map(len, texts)) > length or "\0" in "".join(texts)):
            column = truncated[name]
            truncated[name] = [None if text is None else text.replace("\0", "\ufffd")[:length] for text in column]
    return truncated


@cache
def _text_lengths(table: sa.Table) -> tuple[tuple[str, int], ...]:
    """Return the text columns with their maximum length."""
    return tuple((c.name, c.type.length or sys.maxsize) for c in table.c if isinstance(c.type, sa.String))
